"""Which checkpoints stay: the newest, every so many, the best; and that what cannot be deleted ends no run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.load import load_run
from tepo_megatron.run.output.output import Retention
from tepo_megatron.trainer.checkpoint_folder import checkpoint_folder, checkpoints, retained, step_of
from tests.support.checkpoints import make_whole


def run(out: Path, values: dict[int, float | None], *overrides: str, said: list[str] | None = None) -> list[int]:
    """The steps that are there after a run that saves at each of these steps, with the metric of each."""
    config = load_run(None, [f"output={out}", *overrides])
    retention = Retention(config, print if said is None else said.append)  # a checkpoint before it is an earlier run's
    for step, value in values.items():
        make_whole(out / "checkpoints", step, ranks=1)
        with (out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step} | ({} if value is None else {"reward/mean": value})) + "\n")
        retention.after_row(step)
    return [step_of(path) for path in checkpoints(out / "checkpoints")]


BEST = "train.keep_best.metric=reward/mean"


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ([], [8, 10]),
        (["train.keep_checkpoints=1"], [10]),
        (["train.keep_every=4"], [4, 8, 10]),
        ([BEST], [2, 8, 10]),
        ([BEST, "train.keep_best.mode=min"], [4, 8, 10]),
        ([BEST, "train.keep_best.mode=min", "train.keep_checkpoints=1", "train.keep_every=3"], [4, 6, 10]),
    ],
)
def test_the_newest_every_so_many_and_the_best_stay(overrides: list[str], kept: list[int], tmp_path: Path) -> None:
    assert run(tmp_path, {2: 0.9, 4: 0.1, 6: None, 8: 0.5, 10: 0.3}, *overrides) == kept


def test_of_equal_ones_the_newest_is_the_best_and_a_resumed_run_knows_the_old_best(tmp_path: Path) -> None:
    assert run(tmp_path, {1: 0.5, 2: 0.5, 3: 0.1}, BEST, "train.keep_checkpoints=1") == [2, 3]
    assert run(tmp_path, {4: 0.2, 5: 0.3}, BEST, "train.keep_checkpoints=1") == [2, 5]


def test_a_metric_that_is_nowhere_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    assert run(tmp_path, {1: None, 2: None, 3: None}, BEST, said=said) == [2, 3]
    assert said == ["train.keep_best.metric = reward/mean is in no row of a step that was saved: none is kept as the best"]


@given(st.sets(st.integers(1, 60)), st.integers(1, 5), st.integers(0, 7), st.integers(1, 60) | st.none())
def test_what_stays_is_the_union_of_the_three(steps: set[int], newest: int, every: int, best: int | None) -> None:
    kept = retained(steps, newest=newest, every=every, best=best)
    assert kept <= steps
    for step in steps:
        later = sum(other > step for other in steps)
        assert (step in kept) == (later < newest or step == best or (every > 0 and step % every == 0))


def test_a_row_without_a_checkpoint_deletes_nothing_and_leftovers_go(tmp_path: Path) -> None:
    parent = tmp_path / "checkpoints"
    for step in (1, 2):
        make_whole(parent, step, ranks=1)
    (parent / "step_000002.partial").mkdir()
    (parent / "step_000009.partial").mkdir()
    (parent / "step_000009.damaged").mkdir()
    retention = Retention(load_run(None, [f"output={tmp_path}"]), print)
    retention.after_row(2)
    assert len(list(parent.iterdir())) == 5
    make_whole(parent, 4, ranks=1)  # written beside the training of step 5
    retention.after_row(3)
    assert len(list(parent.iterdir())) == 6, "its row is not written"
    retention.after_row(5)
    kept = ["step_000002", "step_000004", "step_000009.damaged", "step_000009.partial"]  # the last one may be on its way
    assert sorted(path.name for path in parent.iterdir()) == kept


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_what_cannot_be_removed_is_said_and_no_longer_a_checkpoint(tmp_path: Path) -> None:
    parent, said = tmp_path / "checkpoints", list[str]()
    retention = Retention(load_run(None, [f"output={tmp_path}", "train.keep_checkpoints=1"]), said.append)
    for step in (1, 2):
        make_whole(parent, step, ranks=1)
    busy = parent / "step_000001.partial"
    busy.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(busy)], capture_output=True).returncode:
        pytest.skip("this machine mounts nothing")
    try:
        retention.after_row(2)
        assert [sentence.partition(" could not")[0] for sentence in said] == [str(busy)]
        assert "busy" in said[0]
        assert checkpoints(parent) == [checkpoint_folder(parent, 2)]
    finally:
        subprocess.run(["umount", str(busy)], check=True)
