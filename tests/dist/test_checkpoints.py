"""Checkpoints of real worlds: damaged ones passed over by all ranks alike, disks that fill up, runs that are another run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.sampler.rollout_file import write_rollouts
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.weights.storage.manifest import CheckpointManifest
from tests.support.checkpoints import flip_bit, shards
from tests.support.launch import run_world

PROMPTS, SAMPLES, STEPS = 2, 2, 4


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rollouts")
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        rollouts = []
        for at in range(PROMPTS * SAMPLES):
            response = tuple(torch.randint(3, 64, (5 + at,), generator=generator).tolist())
            logprobs = tuple(-0.5 for _ in response)
            group = at // SAMPLES
            rollouts.append(
                Rollout(f"p{group}", group, (1, 9 + group), response, logprobs, "stop", WeightsVersion(step), reward=at % 2)
            )
        write_rollouts(folder, step, rollouts)
    return folder


def train(out: Path, replay: Path, *overrides: str) -> str:
    """A run on two ranks; what rank 0 printed. RuntimeError with the ranks' log if it fails."""
    size = [f"rollout.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}", "train.minibatches=2"]
    size += ["rollout.sampling.max_new_tokens=32"]
    given = [*size, "engine.parallel.tp=2", "optimizer.lr=1e-3", "engine.noise_sequences=2", "log.tensorboard=false"]
    run_world("train", 2, f"output={out}", f"rollout.replay={replay}", *given, "log.progress=plain", *overrides)
    return (out / "printed.txt").read_text()


KEPT = ("train.save_every=1", "train.keep_checkpoints=9")


@pytest.fixture(scope="module")
def trained(replay: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    train(out, replay, f"train.steps={STEPS}", "train.save_every=1", "train.keep_every=2", "train.keep_checkpoints=1")
    return out


def exported(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


def test_a_run_keeps_what_it_was_told_to(trained: Path) -> None:
    assert sorted(path.name for path in (trained / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
    folder = trained / "checkpoints" / "step_000004"
    assert CheckpointManifest.read_whole(folder).step == 4
    state = json.loads((folder / "state.json").read_text())
    assert state["updates"] == 8
    assert state["identity"]["architecture"]["num_layers"] == 4
    assert state["identity"]["config"]["optimizer"]["lr"] == 1e-3
    assert set(state["identity"]["versions"]) >= {"torch", "megatron-core"}


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
        *("step_000001", "step_000002", "step_000003", "step_000003.damaged", "step_000004"),
    ]
    assert exported(tmp_path) == exported(trained)
    ours = json.loads((tmp_path / "checkpoints" / "step_000004" / "manifest.json").read_text())["files"]
    theirs = json.loads((trained / "checkpoints" / "step_000004" / "manifest.json").read_text())["files"]
    del ours["state.json"], theirs["state.json"]  # they say how often was saved
    assert ours == theirs
    assert "train:\n  steps: 3" in (tmp_path / "resolved.1.yaml").read_text()

    # and an older one that is chosen, with a learning rate that is let through
    changed = ["optimizer.lr=2e-3", f"train.steps={STEPS}", *KEPT, "train.resume=true", "train.resume_from=step_000001"]
    resolved = (tmp_path / "resolved.yaml").read_bytes()
    with pytest.raises(RuntimeError, match=r"(?s)would not be the same run:\n  optimizer\.lr: 0\.001 -> 0\.002\n"):
        train(tmp_path, replay, *changed)
    assert (tmp_path / "resolved.yaml").read_bytes() == resolved
    printed = train(tmp_path, replay, *changed, "train.allow_change=[optimizer.lr]")
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


def save_fails(tmp_path: Path, folder: Path, *overrides: str, limited_rank: int | None = None, limit: int = 0) -> list[Any]:
    """What each of two ranks reports; the older checkpoint is whole and was loaded."""
    case = {"folder": str(folder), "out": str(tmp_path), "limited_rank": limited_rank, "limit": limit}
    case["background"] = limited_rank == 0
    (tmp_path / "case.json").write_text(json.dumps({**case, "overrides": [f"output={folder.parent}", *overrides]}))
    run_world("save_fails", 2, tmp_path / "case.json")
    reports = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert reports[0] == reports[1]
    assert reports[0]["before"] == reports[0]["after"]
    assert reports[0]["noise"] == 0.25  # an adaptive coefficient: the objective's tolerance, measured now and then
    assert [path.name for path in folder.iterdir()] == ["step_000001"]
    CheckpointManifest.read_whole(folder / "step_000001")
    return [report["said"] for report in reports]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_ends_the_save_of_all(rank: int, tmp_path: Path) -> None:
    """Rank 0's writes beside training; the other way is as it is by default."""
    split = ["engine.parallel.tp=2"] if rank else ["engine.parallel.dp=2", "optimizer.distributed=true"]
    said, _ = save_fails(tmp_path, tmp_path / "checkpoints", *split, limited_rank=rank, limit=100_000)
    found = re.fullmatch(
        rf"checkpoint (\S+)/step_000002 could not be written by rank {rank} \(\1/step_000002\.partial/shards/"
        rf"rank0000{rank}-00001\.safetensors: File too large \(EFBIG\)\); it needs ([\d,]+) bytes, [\d,]+ bytes are free; the "
        r"older checkpoints are as they were \(the newest is step_000001\)\. Make room \('tepo checkpoint prune \1' removes "
        r"older ones\) and go on with --resume",
        said,
    )
    assert found, said
    needed = int(found[2].replace(",", ""))
    stored = sum(path.stat().st_size for path in shards(tmp_path / "checkpoints" / "step_000001"))
    assert needed <= stored < needed + 100_000


def test_training_goes_on_beside_a_save_and_a_kill_meanwhile_loses_that_checkpoint_alone(tmp_path: Path) -> None:
    """On a disk that writes nothing before the update is over."""
    folder = tmp_path / "checkpoints"
    (tmp_path / "case.json").write_text(json.dumps({"folder": str(folder), "out": str(tmp_path)}))
    with pytest.raises(RuntimeError, match=r"SIGKILL|exit code -9"):
        run_world("save_killed", 2, tmp_path / "case.json")
    before, meanwhile = json.loads((tmp_path / "report.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == ["step_000001", "step_000002.partial"]
    assert CheckpointManifest.read_whole(folder / "step_000001").step == 1
    assert json.loads((folder / "step_000001" / "state.json").read_text())["weights_digest"] == before
    assert meanwhile != before, "an update was made while the states of before were being written"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine mounts nothing")
    try:
        said, _ = save_fails(tmp_path, disk / "checkpoints", "engine.parallel.tp=2")
        assert "No space left on device (ENOSPC)" in said
    finally:
        subprocess.run(["umount", str(disk)], check=True)
