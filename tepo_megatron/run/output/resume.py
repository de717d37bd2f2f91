"""Chooses the checkpoint to resume from and refuses another run's."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.data import BUILTIN
from tepo_megatron.config.load import dump_resolved, override
from tepo_megatron.config.paths import paths_in
from tepo_megatron.config.schema import with_plugins
from tepo_megatron.run.loggers import Loggers
from tepo_megatron.runtime.files import try_writing, write_atomically
from tepo_megatron.runtime.hub import HUB
from tepo_megatron.runtime.restarts import job_of_checkpoints, starts_again
from tepo_megatron.runtime.run_lock import RunLock
from tepo_megatron.trainer.checkpoint_folder import checkpoints, read_state, set_aside, step_of
from tepo_megatron.trainer.run_compatibility import Difference, compare_runs, describe_run, idle_entries, is_allowed, refusal
from tepo_megatron.weights.storage.manifest import MANIFEST, DamagedCheckpoint

if TYPE_CHECKING:
    from tepo_megatron.trainer.protocol import Trainer


@dataclass(frozen=True)
class Resumed:
    """``damaged``: skipped checkpoints, newest first."""

    folder: Path
    state: Mapping[str, Any]
    differences: Sequence[Difference] = ()
    damaged: Sequence[DamagedCheckpoint] = ()

    @staticmethod
    def is_of_this_job(folder: Path) -> bool:
        with suppress(DamagedCheckpoint):
            return read_state(folder).get("job") == job_of_checkpoints()
        return False

    @classmethod
    def find(cls, config: RunConfig, model_dir: Path) -> Resumed:
        """Reads no shards and needs no torch. Raises ValueError if none is whole, the newest whole one is
        of another run or model, or the run is over.
        """
        return _accepted(config, model_dir, _first_whole(_candidates(config), read_state))

    @classmethod
    def load(cls, config: RunConfig, engine: Trainer, model_dir: Path) -> Resumed:
        """Checks every byte. Every rank calls; all get the same checkpoint, or ``find``'s ValueError."""
        # On a shared disk the ranks need not see the same at once: only rank 0's candidates count, or that it has none.
        try:
            seen: list[Any] = [[str(folder) for folder in _candidates(config)], ""]
        except ValueError as none:
            seen = [[], str(none)]
        folders, error = engine.broadcast_from_root(seen)
        if error:
            raise ValueError(error)
        checkpoint = _accepted(config, model_dir, _first_whole(map(Path, folders), engine.checkpoints.check))
        saved, present = checkpoint.state.get("reference_digest"), engine.reference_digest
        if saved is not None and present not in (None, saved) and not is_allowed("model.path", config.train.allow_change):
            raise ValueError(
                f"the run cannot continue from {checkpoint.folder}, it would not be the same run:\n  the weights of the "
                f"reference model in model.path, by their digest: {saved} -> {present}\nset model.path back, or let it "
                "through: train.allow_change=[model.path]"
            )
        engine.checkpoints.load(checkpoint.folder, checked=dict(checkpoint.state))
        return checkpoint

    @classmethod
    def newest_whole(cls, config: RunConfig, engine: Trainer, reason: str) -> Resumed | None:
        """None without checkpoints. Every rank calls. Raises RuntimeError if none is whole."""
        folders = engine.broadcast_from_root([str(folder) for folder in reversed(checkpoints(config.output / "checkpoints"))])
        whole, damaged = _first_whole(map(Path, folders), engine.checkpoints.check)
        if whole is None and damaged:
            raise RuntimeError(f"{reason}, and the run cannot go back: {_none_whole(config, damaged)}")
        return None if whole is None else cls(*whole, damaged=damaged)

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def messages(self, config: RunConfig, restarted: Sequence[str] = ()) -> list[str]:
        """``restarted``: changed fields for which the problems are drawn from the beginning."""
        sentences = [f"{error}; resuming from {self.folder.name}" for error in self.damaged]
        sentences.append(f"resumed from {self.folder} at step {self.step}")
        if "identity" not in self.state:
            sentences.append(
                f"{self.folder.name} has no {MANIFEST}, as an earlier version wrote it: neither its bytes nor its run could be "
                "checked"
            )
        shown = [difference for difference in self.differences if difference.field not in ("name", "output")]
        sentences += [f"differs from the checkpoint's run: {difference}" for difference in shown]
        if restarted:
            fields = " and ".join(restarted)
            sentences.append(f"{fields} differ from the checkpoint's run: the problems are drawn from the beginning")
        changed = [*(difference.field for difference in self.differences), *restarted]
        if idle := idle_entries(changed, config.train.allow_change):
            sentences.append(f"train.allow_change: nothing differs in {', '.join(idle)}")
        return sentences

    def accept(self, config: RunConfig) -> list[str]:
        """Rank 0 calls. Returns what failed."""
        failed = self.set_aside_others(config)
        path, text = config.output / "resolved.yaml", dump_resolved(config, with_resume=False)
        present = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
        with unwritable_is_a_sentence(config.output):
            if present not in (None, "", text):
                older = (path.with_name(f"resolved.{number}.yaml") for number in count(1))
                write_atomically(next(name for name in older if not name.exists()), str(present))
            write_atomically(path, text)
        return failed

    def set_aside_others(self, config: RunConfig) -> list[str]:
        """Renames damaged and later checkpoints. Rank 0 calls. Returns what failed."""
        failed = []
        broken = {error.folder.resolve() for error in self.damaged}
        for folder in checkpoints(config.output / "checkpoints"):
            is_damaged = folder.resolve() in broken
            if is_damaged or step_of(folder) > self.step:
                try:
                    set_aside(folder, "damaged" if is_damaged else "abandoned")
                except OSError as error:
                    failed.append(f"{folder} could not be renamed ({error.strerror}); remove it by hand")
        return failed


def resumes(config: RunConfig) -> bool:
    return config.train.resume is True or (config.train.resume == "auto" and bool(checkpoints(config.output / "checkpoints")))


def of_attempt(config: RunConfig) -> RunConfig:
    """Restarted ranks and jobs continue from their job's newest checkpoint; without one they start as at first."""
    if not starts_again():
        return config
    saved = checkpoints(config.output / "checkpoints")
    if config.train.resume_from is not None and not any(map(Resumed.is_of_this_job, saved)):
        return config
    return override(config, ["train.resume=auto", "train.resume_from=null"])


def resolve_dtype(config: RunConfig, gpus: int) -> RunConfig:
    """``model.dtype: auto`` is the checkpoint's if the run resumes, otherwise the machine's."""
    whole = None
    if config.model.dtype == "auto" and resumes(config):
        with suppress(ValueError):  # no checkpoint is visible from here; rank 0's resume refuses, or the ranks' comparison
            whole, _ = _first_whole(_candidates(config), read_state)
    return config.with_dtype(config.dtype(gpus) if whole is None else _saved_dtype(whole[1]))


def _saved_dtype(state: Mapping[str, Any]) -> str:
    """A checkpoint without identity is of a version that had float32 as default."""
    return str(state["identity"]["architecture"]["dtype"]) if "identity" in state else "float32"


_Whole = tuple[tuple[Path, Mapping[str, Any]] | None, Sequence[DamagedCheckpoint]]


def _first_whole(folders: Iterable[Path], check: Callable[[Path], Mapping[str, Any]]) -> _Whole:
    damaged: list[DamagedCheckpoint] = []
    for folder in folders:
        try:
            return (folder, check(folder)), damaged
        except DamagedCheckpoint as error:
            damaged.append(error)
    return None, damaged


def _accepted(config: RunConfig, model_dir: Path, result: _Whole) -> Resumed:
    whole, damaged = result
    if whole is None:
        raise ValueError(_none_whole(config, damaged))
    folder, state = whole
    steps, step = config.train.steps, int(state["step"])
    if steps < step:
        raise ValueError(
            f"train.steps = {steps}, but {folder} has {step} already; raise train.steps, or give an earlier one (--from)"
        )
    if steps == step and _is_finished(config, folder):
        raise ValueError(f"the run has reached train.steps = {steps}, and is complete in {config.output}; raise train.steps")
    if config.model.dtype == "auto":
        config = config.with_dtype(_saved_dtype(state))
    differences: list[Difference] = []
    if "identity" in state:  # one of the first format does not say what its run was
        differences = compare_runs(state["identity"], describe_run(config, model_dir))
    with with_plugins(config.objective.plugins):
        refused = refusal(differences, config.train.allow_change)
    if refused is not None:
        raise ValueError(f"the run cannot continue from {folder}, {refused}")
    return Resumed(folder, state, differences, damaged)


def _candidates(config: RunConfig) -> list[Path]:
    parent = config.output / "checkpoints"
    present = list(reversed(checkpoints(parent)))
    chosen = config.train.resume_from
    if chosen is None:
        if not present:
            overwrite = " and with --overwrite, which removes the rows of that run" if _holds_run(config.output) else ""
            raise ValueError(
                f"there is nothing to resume: {parent} has no finished checkpoint; start without --resume{overwrite}"
            )
        return present
    folder = Path(chosen) if "/" in chosen else parent / chosen
    if not folder.is_dir():
        others = f"there are {', '.join(path.name for path in reversed(present))}" if present else "there is none"
        raise ValueError(f"train.resume_from = {chosen}: {folder} is not there; in {parent} {others}")
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
    if folder.resolve().parent != (config.output / "checkpoints").resolve():
        return True  # another run's: there is nothing to complete here
    names = ["model", *([] if config.model.lora is None else ["adapter"])]
    names += ["curves.png"] if config.log.curves else []  # 'tepo plot' draws one without the others
    made, saved = [config.output / name for name in names], (folder / "state.json").stat().st_mtime
    return all(path.exists() and path.stat().st_mtime >= saved for path in made)


LOGGED = ("metrics.jsonl", "samples.jsonl", "train_samples.jsonl", "tokens/step_*", "tensorboard/events.out.tfevents.*")

JOURNAL = ("journal/groups/step_*", "journal/step_*")

MADE_BY_A_RUN = (
    *LOGGED,
    *JOURNAL,
    *("resolved.yaml", "resolved.*.yaml", "curves.png", "model", "adapter"),
    *("metrics.before-*.jsonl", "samples.before-*.jsonl", "train_samples.before-*.jsonl", "tokens.before-*"),
    *("checkpoints/step_*", "rollouts/step_*", "skipped/step_*", "status/*"),
    *("logs/server-*", "logs/hang-*", "logs/wandb.log", "logs/mlflow.log", "wandb/*", "mlflow/*"),
)
"""``--overwrite`` removes these but for ``resolved.yaml``, and no files of ``tepo launch``."""


_FIRST_ROW = re.compile(rb'\{"step": 0[,}]')  # the evaluation before the first step


def prepare_folder(config: RunConfig, *, overwrite: bool = False, check: Callable[[], object] = bool) -> None:
    """Raises ValueError if no run can start or resume there. ``check`` is of the new run, before the old one is removed."""
    folder = config.output
    if overwrite and config.train.resume:
        raise ValueError(f"--overwrite starts again and train.resume = {config.train.resume} continues; give one of the two")
    Loggers.check_installed(config.log)
    _check_writable(folder)
    with unwritable_is_a_sentence(folder):
        RunLock.check_free(folder)
    if overwrite and _holds_run(folder):
        _check_nothing_is_read_from(config)
        check()
        _remove_run(config)
    check_no_run(config)


def _holds_run(folder: Path) -> bool:
    """A failed start leaves no checkpoint and no row of a trained step; a damaged row counts as one."""
    metrics = folder / "metrics.jsonl"
    whole = metrics.read_bytes().split(b"\n")[:-1] if metrics.is_file() else []
    return bool(checkpoints(folder / "checkpoints")) or any(line.strip() and not _FIRST_ROW.match(line) for line in whole)


def check_no_run(config: RunConfig) -> None:
    if not config.train.resume and _holds_run(config.output):
        saved = checkpoints(config.output / "checkpoints")
        resume = "continue it (--resume)" if saved else "which --resume cannot continue, as it left no checkpoint"
        raise ValueError(
            f"output {config.output} already holds a run; give another folder (output=…), {resume}, or remove what it has "
            "written and start again (--overwrite)"
        )


@contextmanager
def unwritable_is_a_sentence(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"output {folder} cannot be written: {error.strerror or error} ({error.filename or folder}); give another folder "
            "(output=…), or make room and rights there"
        ) from error


def _check_writable(folder: Path) -> None:
    with unwritable_is_a_sentence(folder):
        there = folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            try_writing(folder)
        finally:
            if not there:
                with suppress(OSError):  # another run may have come into it
                    folder.rmdir()


def _remove_run(config: RunConfig) -> None:
    folder = config.output
    lock = RunLock(folder)
    with unwritable_is_a_sentence(folder):
        lock.take()
        try:
            for pattern in MADE_BY_A_RUN:
                if pattern == "resolved.yaml":
                    continue  # it may be what the new run, or another rank of it, reads; the run replaces it
                for path in folder.glob(pattern):
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    else:
                        path.unlink()
                if "/" in pattern:
                    with suppress(OSError):  # not empty: others' files are there; or never made
                        (folder / pattern).parent.rmdir()
        finally:
            lock.release()


def _check_nothing_is_read_from(config: RunConfig) -> None:
    for name, path in paths_in(config).items():
        if name == "output" or name.endswith((".registry", "key_file")) or path.endswith(".py"):
            continue  # an --overwrite leaves them
        if not path.startswith((BUILTIN, HUB)) and Path(path).resolve().is_relative_to(config.output.resolve()):
            raise ValueError(f"--overwrite would remove what {name} = {path} reads; move it, or give another folder (output=…)")
