"""Chooses the checkpoint to resume from, and refuses one of another run.

:func:`find_checkpoint` needs no torch and reads little, for the parent. In :func:`resume` the ranks read every byte, and agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.loading.load import dump_resolved
from tepo_megatron.run.output.run_folder import holds_run
from tepo_megatron.trainer.checkpoints.folder import checkpoints, read_state, set_aside, step_of
from tepo_megatron.trainer.checkpoints.run_compatibility import (
    Difference,
    compare_runs,
    describe_run,
    idle_entries,
    is_allowed,
    refusal,
)
from tepo_megatron.weights.storage.manifest import MANIFEST, DamagedCheckpoint

if TYPE_CHECKING:
    from tepo_megatron.tasks.data.mixture import ProblemOrder
    from tepo_megatron.trainer.protocol import Trainer


@dataclass(frozen=True)
class Resumed:
    """A checkpoint, its state, differences between its run and this one, and checkpoints passed over, newest first."""

    folder: Path
    state: Mapping[str, Any]
    differences: Sequence[Difference] = ()
    damaged: Sequence[DamagedCheckpoint] = field(default_factory=list)

    @property
    def step(self) -> int:
        return int(self.state["step"])


def resumes(config: RunConfig) -> bool:
    """With ``train.resume = auto``, only if there is a checkpoint."""
    return config.train.resume is True or (config.train.resume == "auto" and bool(checkpoints(config.output / "checkpoints")))


def find_checkpoint(config: RunConfig, model_dir: Path) -> Resumed:
    """The output folder's newest checkpoint, or that of ``train.resume_from``, without reading shards.

    Raises ValueError if there is none, none is whole, it is of another run or model, or the run is over.
    """
    damaged: list[DamagedCheckpoint] = []
    for folder in _candidates(config):
        try:
            state = read_state(folder)
        except DamagedCheckpoint as error:
            damaged.append(error)
            continue
        return judge(config, model_dir, folder, state, damaged)
    raise ValueError(_none_whole(config, damaged))


def resume(config: RunConfig, engine: Trainer, model_dir: Path) -> Resumed:
    """Restores the first checkpoint that is whole to the last byte. Every rank calls; all get the same one, or the ValueError
    of :func:`find_checkpoint`.
    """
    whole, damaged = first_whole(engine, _candidates(config))
    if whole is None:
        raise ValueError(_none_whole(config, damaged))
    folder, state = whole
    found = judge(config, model_dir, folder, state, damaged)
    _check_reference(config, engine, found)
    engine.checkpoints.load(folder, checked=state)
    return found


def first_whole(engine: Trainer, folders: Sequence[Path]) -> tuple[tuple[Path, dict[str, Any]] | None, list[DamagedCheckpoint]]:
    """The first checkpoint that is whole to the last byte, its state, and the damaged ones before it.

    Every rank calls, and gets the same; only rank 0's ``folders`` are read.
    """
    damaged: list[DamagedCheckpoint] = []
    # On a shared disk the ranks need not see the same at once.
    for folder in map(Path, engine.broadcast_from_root([str(folder) for folder in folders])):
        try:
            return (folder, engine.checkpoints.check(folder)), damaged
        except DamagedCheckpoint as error:
            damaged.append(error)
    return None, damaged


def newest_whole(config: RunConfig, engine: Trainer, reason: str) -> Resumed | None:
    """As :func:`first_whole`, of the output folder; None without checkpoints. Every rank calls. Raises RuntimeError if none is
    whole.
    """
    whole, damaged = first_whole(engine, list(reversed(checkpoints(config.output / "checkpoints"))))
    if whole is not None:
        return Resumed(*whole, damaged=damaged)
    if damaged:
        raise RuntimeError(f"{reason}, and the run cannot go back: {_none_whole(config, damaged)}")
    return None


def judge(
    config: RunConfig, model_dir: Path, folder: Path, state: Mapping[str, Any], damaged: Sequence[DamagedCheckpoint] = ()
) -> Resumed:
    """Raises ValueError if this run cannot continue from the checkpoint."""
    steps, step = config.train.steps, int(state["step"])
    if steps < step:
        raise ValueError(
            f"train.steps = {steps}, but {folder} has {step} already; raise train.steps, or give an earlier one (--from)"
        )
    if steps == step and _is_finished(config, folder):
        raise ValueError(f"the run has reached train.steps = {steps}, and is complete in {config.output}; raise train.steps")
    differences: list[Difference] = []
    if "identity" in state:  # one of the first format does not say what its run was
        differences = compare_runs(state["identity"], describe_run(config, model_dir))
    refused = refusal(differences, config.train.allow_change)
    if refused is not None:
        raise ValueError(f"the run cannot go on from {folder}, {refused}")
    return Resumed(folder, state, differences, damaged)


def messages(config: RunConfig, found: Resumed) -> list[str]:
    """Tells what was passed over, where the run continues, what differs, and unused permissions."""
    said = [f"{error}; resuming from {found.folder.name}" for error in found.damaged]
    said.append(f"resumed from {found.folder} at step {found.step}")
    if "identity" not in found.state:
        earlier = f"{found.folder.name} has no {MANIFEST}, as an earlier version wrote it"
        said.append(f"{earlier}: neither its bytes nor its run could be checked")
    said += [f"differs from the checkpoint's run: {each}" for each in found.differences if each.field not in ("name", "output")]
    idle = idle_entries(found.differences, config.train.allow_change)
    if idle:
        said.append(f"train.allow_change: nothing differs in {', '.join(idle)}")
    return said


def accept(config: RunConfig, found: Resumed) -> list[str]:
    """Sets aside checkpoints that are not the resumed run's past, and writes ``resolved.yaml`` after a copy to
    ``resolved.1.yaml``. Rank 0 calls.

    Returns a sentence for each failed rename.
    """
    failed = set_aside_others(config, found)
    write_resolved(config)
    return failed


def set_aside_others(config: RunConfig, found: Resumed) -> list[str]:
    """Renames checkpoints that are damaged or later than the resumed one. Rank 0 calls; returns as :func:`accept`."""
    failed = []
    broken = {error.folder.resolve() for error in found.damaged}
    for folder in checkpoints(config.output / "checkpoints"):
        is_damaged = folder.resolve() in broken
        if is_damaged or step_of(folder) > found.step:
            try:
                set_aside(folder, "damaged" if is_damaged else "abandoned")
            except OSError as error:
                failed.append(f"{folder} could not be renamed ({error.strerror}); remove it by hand")
    return failed


def write_resolved(config: RunConfig) -> None:
    path, text = config.output / "resolved.yaml", dump_resolved(config)
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
        number = 1
        while (kept := path.with_name(f"resolved.{number}.yaml")).exists():
            number += 1
        path.rename(kept)
    path.write_text(text, encoding="utf-8")


def restore_data(sampler: ProblemOrder, found: Mapping[str, Any], allowed: Sequence[str]) -> str | None:
    """Continues the order of the problems. Another seed or other problems raise ValueError, unless ``train.allow_change``
    permits them: then the order starts again, and a sentence is returned.
    """
    if "sampler" not in found:
        raise ValueError("the checkpoint does not say which problems were drawn; it was not written by a training run")
    saved, own = found["sampler"], sampler.state()
    differing = [name for name, key in (("data.train", "problems"), ("seed", "seed")) if saved[key] != own[key]]
    if not differing or not all(is_allowed(name, allowed) for name in differing):
        sampler.restore(saved)
        return None
    return f"{' and '.join(differing)} differ from the checkpoint's run: the problems are drawn from the beginning"


def _candidates(config: RunConfig) -> list[Path]:
    parent = config.output / "checkpoints"
    present = list(reversed(checkpoints(parent)))
    chosen = config.train.resume_from
    if chosen is None:
        if not present:
            anew = " and with --overwrite, since the folder has rows of a run" if holds_run(config.output) else ""
            raise ValueError(f"train.resume = true, but {parent} has no finished checkpoint; start without --resume{anew}")
        return present
    folder = Path(chosen) if "/" in chosen else parent / chosen
    if not folder.is_dir():
        there = f"there are {', '.join(path.name for path in reversed(present))}" if present else "there is none"
        raise ValueError(f"train.resume_from = {chosen}: {folder} is not there; in {parent} {there}")
    return [folder]


def _none_whole(config: RunConfig, damaged: Sequence[DamagedCheckpoint]) -> str:
    listed = "; ".join(map(str, damaged))
    if config.train.resume_from is not None:
        return f"train.resume_from: {listed}; choose another one (tepo checkpoint list {config.output}), or leave it out"
    return (
        f"no checkpoint in {config.output / 'checkpoints'} is whole: {listed}. Restore one from a copy (tepo checkpoint verify "
        "shows every file), or start again in another folder"
    )


def _is_finished(config: RunConfig, folder: Path) -> bool:
    """The picture is drawn last, after the export."""
    picture = config.output / "curves.png"
    if folder.resolve().parent != (config.output / "checkpoints").resolve():
        return True  # another run's: there is nothing to complete here
    return picture.exists() and picture.stat().st_mtime >= (folder / "state.json").stat().st_mtime


def _check_reference(config: RunConfig, engine: Trainer, found: Resumed) -> None:
    saved = found.state.get("reference_digest")
    if saved is None or engine.reference_digest in (None, saved) or is_allowed("model.path", config.train.allow_change):
        return
    raise ValueError(
        f"the run cannot go on from {found.folder}, it would not be the same run:\n  the weights of the reference model in "
        f"model.path, by their digest: {saved} -> {engine.reference_digest}\nset model.path back, or let it through: "
        "train.allow_change=[model.path]"
    )
