"""Checkpoints of real worlds: damaged ones passed over by all ranks alike, disks that fill up, runs that are another run."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tepo_megatron.config.objective.choices import ClipRange
from tepo_megatron.runtime import files
from tepo_megatron.runtime.heartbeat import Heartbeat
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tools.faults.workshop import REPLAYED, make_rollouts
from tepo_megatron.trainer.megatron.policy import checkpoints
from tepo_megatron.weights.storage import stored
from tepo_megatron.weights.storage.manifest import CheckpointManifest
from tests.support.checkpoints import flip_bit, shards
from tests.support.engines import make_engine, save_checkpoint
from tests.support.launch import run_dist, run_world
from tests.support.processes import files_of_at_most
from tests.support.random_models import draw_rollouts, random_model

STEPS = 4


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rollouts(tmp_path_factory.mktemp("rollouts"), STEPS)


def train(out: Path, replay: Path, *overrides: str) -> str:
    """A run on two ranks; what rank 0 printed. RuntimeError with the ranks' log if it fails."""
    given = [*REPLAYED, "engine.parallel.tp=2", "optimizer.lr=1e-3", "engine.noise_sequences=2"]
    run_world("train", 2, f"output={out}", f"rollout.replay={replay}", *given, *overrides)
    return (out / "printed.txt").read_text()


KEPT = ("train.save_every=1", "train.keep_checkpoints=9")


@pytest.fixture(scope="module")
def trained(replay: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    train(out, replay, f"train.steps={STEPS}", "train.save_every=1", "train.keep_every=2", "train.keep_checkpoints=1")
    return out


def exported(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


def test_a_damaged_newest_checkpoint_is_passed_over_and_the_run_ends_as_if_nothing_had_been(
    trained: Path, replay: Path, tmp_path: Path
) -> None:
    train(tmp_path, replay, "train.steps=3", *KEPT)
    folders = [tmp_path / "checkpoints" / f"step_{step:06d}" for step in (1, 2, 3)]
    flip_bit(shards(folders[2])[1], 123456)
    printed = train(tmp_path, replay, f"train.steps={STEPS}", *KEPT, "train.resume=true")
    damage = "shards/rank00001-00001.safetensors was changed since it was written"
    assert f"step_000003 is damaged ({damage}); resuming from step_000002" in printed
    assert f"resumed from {folders[1]} at step 2" in printed
    assert "train.steps: 3 -> 4" in printed
    assert "versions." not in printed
    assert sorted(path.name for path in folders[0].parent.iterdir()) == [
        *("step_000001", "step_000002", "step_000003", "step_000003.damaged", "step_000004")
    ]
    assert exported(tmp_path) == exported(trained)
    assert [path.name for path in sorted((trained / "checkpoints").iterdir())] == ["step_000002", "step_000004"]
    ours, theirs = (CheckpointManifest.read_whole(out / "checkpoints" / "step_000004").files for out in (tmp_path, trained))
    assert {**ours, "state.json": None} == {**theirs, "state.json": None}  # it says how often was saved
    assert "train:\n  steps: 3" in (tmp_path / "resolved.1.yaml").read_text()

    # and an older one that is chosen, with a learning rate that is let through
    older = [f"train.steps={STEPS}", *KEPT, "train.resume=true", "train.resume_from=step_000001"]
    printed = train(tmp_path, replay, *older, "optimizer.lr=2e-3", "train.allow_change=[optimizer.lr]")
    assert "differs from the checkpoint's run: optimizer.lr: 0.001 -> 0.002" in printed
    assert exported(tmp_path) != exported(trained)
    assert (tmp_path / "checkpoints" / "step_000002.abandoned").is_dir()


def test_another_reference_model_and_none_whole_end_all_ranks_with_one_sentence(replay: Path, tmp_path: Path) -> None:
    reference = ["objective.kl.coefficient=0.1", "objective.kl.against=reference"]
    train(tmp_path, replay, "train.steps=2", *KEPT, *reference)
    model = tmp_path / "other"
    shutil.copytree(resolve_model_path("builtin:tiny"), model)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][-1] *= 2  # so little that the samples of the weights do not show it
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    again = [f"train.steps={STEPS}", *KEPT, *reference, "train.resume=true"]
    with pytest.raises(
        RuntimeError, match=r"(?s)would not be the same run:\n  the weights of the reference model in model\.path"
    ):
        train(tmp_path, replay, *again, f"model.path={model}")

    for folder in (tmp_path / "checkpoints").iterdir():
        flip_bit(shards(folder)[0], 99)
    resolved = (tmp_path / "resolved.yaml").read_bytes()
    with pytest.raises(RuntimeError, match=r"is whole: step_000002 is damaged \(.*; step_000001 is damaged \(.*Restore one"):
        train(tmp_path, replay, *again)
    assert (tmp_path / "resolved.yaml").read_bytes() == resolved
    assert not list((tmp_path / "checkpoints").glob("*.damaged"))


def saved_and_loaded(_rank: int, _world: int, model: Path, folder: Path) -> list[str]:
    beats = Heartbeat()
    engine = make_engine({"model": {"path": str(model)}, "engine": {"parallel": {"tp": 4}}}, heartbeat=beats)
    moves = [beats._record.moves]
    saved = save_checkpoint(engine, folder, step=1, state={})
    moves.append(beats._record.moves)
    digest = engine.checkpoints.load(saved)["weights_digest"]
    moves.append(beats._record.moves)
    tensors = len(engine.policy.trained)
    assert all(after - before > tensors for before, after in pairwise([0, *moves])), moves
    state = engine.checkpoints.check(saved)
    identity = state["identity"]
    for rounded in (True, False):
        # as if FP8 parameters were saved, whose digest is of rounded values
        engine_then = {**identity["config"]["engine"], "fp8": {"params": rounded}}
        config = {**identity["config"], "engine": engine_then}
        other = {**state, "weights_digest": "0" * 16, "identity": {**identity, "config": config}}
        with nullcontext() if rounded else pytest.raises(RuntimeError, match="memory or the network of a machine is broken"):
            engine.checkpoints.load(saved, checked=other)
    return [digest, engine.weights.version(1).digest]


def test_a_rank_with_rows_of_padding_alone_resumes(tmp_path: Path) -> None:
    """Of 9 tokens over 4 ranks each has 3, and the last one none. Each tensor that is read or written is a move."""
    sizes = {"vocab_size": 9, "num_key_value_heads": 4, "num_hidden_layers": 1}
    random_model("Llama", **sizes).save_pretrained(tmp_path / "model")
    for saved, loaded in run_dist(4, saved_and_loaded, tmp_path / "model", tmp_path / "checkpoints"):
        assert saved == loaded


def rates_after_other_minibatches(
    _rank: int, _world: int, folder: Path, minibatches: tuple[int, ...], lacking: tuple[str, ...]
) -> list[float]:
    """Saves six of ten steps with the first number of mini-batches, and loads and saves that with each other one.

    ``lacking``: what the first checkpoint did not say.
    """
    rates: list[float] = []
    for number in minibatches:
        optimizer = {"lr": 1e-3, "schedule": "linear", "warmup_steps": 2}
        engine = make_engine({"optimizer": optimizer, "train": {"steps": 10, "minibatches": number}})
        if rates:
            state = engine.checkpoints.check(folder / "step_000006")
            known = {key: value for key, value in state.items() if len(rates) > 1 or key not in lacking}
            engine.checkpoints.load(folder / "step_000006", checked=known)
            assert engine.counters.updates == 6 * minibatches[0]  # Adam's
        else:
            engine.counters.updates = 6 * number
            engine.policy.schedule.step(increment=6 * number)
        rates.append(engine.policy.optimizer.param_groups[0]["lr"])
        save_checkpoint(engine, folder, step=6, state={})
    return rates


@pytest.mark.parametrize(
    ("lacking", "numbers"), [((), (4, 2, 2, 1)), (("scheduled",), (4, 2, 2, 1)), (("scheduled", "identity"), (4, 4, 2))]
)
def test_a_run_resumed_with_other_minibatches_is_as_far_in_its_schedule(
    lacking: tuple[str, ...], numbers: tuple[int, ...], tmp_path: Path
) -> None:
    """Also when it is resumed once more, and from an older checkpoint."""
    (rates,) = run_dist(1, rates_after_other_minibatches, tmp_path, numbers, lacking)
    assert rates == pytest.approx([1e-3 * 4 * number / (10 * number - 2) for number in numbers])


def failing_save(rank: int, _world: int, folder: Path, parallel: dict[str, Any], limited_rank: int | None) -> str:
    """Saves step 1, then step 2, where it fails, then loads step 1; returns what the save said.

    ``limited_rank``, for which the first save fails too, may write no file of more than 100 kB; None: the disk is too small.
    """
    distributed = {"distributed": parallel.get("dp", 1) > 1}
    engine = make_engine({"output": folder.parent, "engine": {"parallel": parallel}, "optimizer": distributed})
    engine.counters.entropy_noise, engine.counters.clip_range = 0.25, ClipRange(0.01, None, 0.1)
    before = engine.weights.version(1).digest
    if limited_rank is not None:
        limit = files_of_at_most(100_000) if limited_rank == rank else nullcontext()
        with limit, pytest.raises(RuntimeError, match=r"no older one\. Make room and start again with --overwrite"):
            save_checkpoint(engine, folder, step=1, state={})
    save_checkpoint(engine, folder, step=1, state={})
    engine.counters.entropy_noise, engine.counters.clip_range = 0.5, ClipRange(0.02, 0.03)
    with torch.no_grad():
        for param in engine.policy.params.values():
            param.add_(1.0)

    def save_again() -> None:
        engine.checkpoints.begin(folder, step=2, state={}, background=limited_rank == 0)
        engine.checkpoints.finish()

    # Python ignores the signal, so that the write itself fails
    with files_of_at_most(100_000) if limited_rank == rank else nullcontext(), pytest.raises(RuntimeError) as failed:
        save_again()
    engine.checkpoints.load(folder / "step_000001")
    if limited_rank is not None:
        save_checkpoint(engine, folder, step=1, state={})  # in place of the one that is there
    assert engine.weights.version(1).digest == before
    assert engine.counters.entropy_noise == 0.25  # what steps have measured
    assert engine.counters.clip_range == ClipRange(0.01, None, 0.1)
    assert isinstance(engine.counters.clip_range, ClipRange)
    return str(failed.value)


def save_fails(folder: Path, parallel: dict[str, Any], limited_rank: int | None = None) -> str:
    """What both of two ranks report; the older checkpoint is whole and was loaded."""
    first, second = run_dist(2, failing_save, folder, parallel, limited_rank)
    assert first == second
    assert [path.name for path in folder.iterdir()] == ["step_000001"]
    CheckpointManifest.read_whole(folder / "step_000001")
    return first


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_ends_the_save_of_all(rank: int, tmp_path: Path) -> None:
    """Rank 0's writes beside training; the other way is as it is by default."""
    message = save_fails(tmp_path / "checkpoints", {"tp": 2} if rank else {"dp": 2}, rank)
    match = re.fullmatch(
        rf"checkpoint (\S+)/step_000002 could not be written by rank {rank} \(\1/step_000002\.partial/shards/"
        rf"rank0000{rank}-00001\.safetensors: File too large \(EFBIG\)\); it needs ([\d,]+) bytes, [\d,]+ bytes are free; the "
        r"older checkpoints are as they were \(the newest is step_000001\)\. Make room \('tepo checkpoint prune \1' removes "
        r"older ones\) and go on with --resume",
        message,
    )
    assert match, message
    needed = int(match[2].replace(",", ""))
    written = sum(path.stat().st_size for path in shards(tmp_path / "checkpoints" / "step_000001"))
    assert needed <= written < needed + 100_000


def save_on_a_failing_disk(rank: int, _world: int, folder: Path, failing_rank: int) -> str:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    engine = make_engine({"output": folder.parent, "engine": {"parallel": {"tp": 2}}})
    engine.checkpoints.begin(folder, step=1, state={})
    with pytest.MonkeyPatch.context() as patch:
        if rank == failing_rank:
            patch.setattr(files, "_PAUSES_S", ())
            patch.setattr(stored, "_write_file", fail)
            patch.setattr(os, "stat", fail)
        with pytest.raises(RuntimeError) as failed:
            engine.checkpoints.finish()
    return str(failed.value)


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (0, r"an unknown number of bytes are free; the older checkpoints could not be listed\. .* go on with --resume"),
        (1, r"[\d,]+ bytes are free; there is no older one\. Make room and start again with --overwrite, .*"),
    ],
)
def test_a_disk_that_fails_on_one_rank_is_one_sentence_of_all(rank: int, said: str, tmp_path: Path) -> None:
    first, second = run_dist(2, save_on_a_failing_disk, tmp_path / "checkpoints", rank)
    assert first == second
    assert re.fullmatch(rf".* written by rank {rank} \(.*: Input/output error \(EIO\)\); .* bytes, {said}", first), first


def saved_and_killed(_rank: int, _world: int, folder: Path) -> None:
    """Saves step 1 in the background, and makes an update meanwhile; then begins to save step 2, and is killed."""
    write_all, writes, may_write, now = stored._write_all, threading.Event(), threading.Event(), [0.0]

    def write_late(handle: int, data: memoryview) -> None:
        writes.set()
        may_write.wait()
        write_all(handle, data)

    engine = make_engine({"engine": {"parallel": {"dp": 2}}, "optimizer": {"distributed": True, "lr": 1e-3}})
    batch = engine.score(engine.batch_from_root(draw_rollouts([5, 9, 7, 12]) if engine.ranks.rank == 0 else None))
    before = engine.weights.version(1).digest
    checkpoints.time = SimpleNamespace(monotonic=lambda: now[0])  # type: ignore[assignment, attr-defined]
    stored._write_all = write_late
    engine.checkpoints.begin(folder, step=1, state={}, background=True)
    writes.wait()
    engine.update(batch)
    now[0] += 10.0
    assert engine.checkpoints.finish(wait=False) is None, "the disk is slower than an update"
    assert engine.weights.version(2).digest != before, "an update was made while the states of before were being written"
    may_write.set()
    saved = engine.checkpoints.finish()
    assert saved.waited_s < saved.stage_s + saved.write_s
    assert json.loads((saved.path / "state.json").read_text())["weights_digest"] == before
    may_write.clear()
    engine.checkpoints.begin(folder, step=2, state={}, background=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_training_goes_on_beside_a_save_and_a_kill_meanwhile_loses_that_checkpoint_alone(tmp_path: Path) -> None:
    """On a disk that writes nothing before the update is over."""
    folder = tmp_path / "checkpoints"
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        run_dist(2, saved_and_killed, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["step_000001", "step_000002.partial"]
    assert CheckpointManifest.read_whole(folder / "step_000001").step == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine mounts nothing")
    try:
        assert "No space left on device (ENOSPC)" in save_fails(disk / "checkpoints", {"tp": 2})
    finally:
        subprocess.run(["umount", str(disk)], check=True)
