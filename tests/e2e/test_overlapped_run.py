"""`tepo train` with the overlapped schedule and a real server: killed, resumed, and replayed to the last bit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.sampler.rollout_file import read_rollouts
from tests.support.kills import Moment, kill_server, last_step, rows, same_bytes, start, train, train_killed_at
from tests.support.processes import assert_none_names
from tests.support.programs import TIMEOUT_S

STEPS = 6
SETTINGS = (
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "engine.parallel.tp=1",
    "engine.parallel.sequence_parallel=false",
    "evaluate.every=0",
    "log.progress=plain",
    f"train.steps={STEPS}",
    "train.minibatches=2",
    "train.schedule=overlap",
    "train.max_staleness=2",
    "objective.preset=decoupled_ppo",
)
FILTERED = "rollout.filter_groups.filters=[zero_variance]"


def server_killed_after(step: int, out: Path) -> Moment:
    """A moment that kills a server when the step is done, and has come when it did."""
    return lambda: last_step(out) >= step and kill_server()


def in_turn(*moments: Moment) -> Moment:
    """Has come when each has, one after the other."""
    left = list(moments)

    def come() -> bool:
        if left and left[0]():
            del left[0]
        return not left

    return come


@pytest.mark.long
def test_an_overlapped_run_that_is_killed_goes_on_and_is_replayed_to_the_same_bits(tmp_path: Path) -> None:
    """Its server is killed while it samples. Then the run is, after its journal has a step that no checkpoint has. Nothing is
    trained on twice: every group is another problem, in all steps, and has variance.
    """
    out, again = tmp_path / "a", tmp_path / "b"
    settings = (*SETTINGS, FILTERED)
    moment = in_turn(server_killed_after(1, out), lambda: last_step(out) >= 3)
    printed = train_killed_at([moment], out, *settings, "rollout.record=true", "train.save_every=2", "train.keep_checkpoints=3")
    assert "; starting it again" in printed
    assert "resumed from" in printed
    assert "takes the rollouts that were drawn before the interruption" in printed
    assert_none_names(out)
    check_run(out)
    for row in rows(out)[1:]:
        assert 0 <= row["idle/trainer"] <= 1
        assert 0 <= row["idle/servers"] <= 1
    assert max(row["staleness/max"] for row in rows(out)[1:]) > 0
    train(f"output={again}", *settings, f"rollout.replay={out / 'rollouts'}")
    check_replay(again, out)


@pytest.mark.faults
@pytest.mark.parametrize("server", [{"count": 2, "tp": 1}, {"count": 1, "tp": 2}], ids=["two servers", "a split server"])
def test_a_killed_server_costs_an_overlapped_run_its_own_requests(server: dict[str, Any], tmp_path: Path) -> None:
    """A process of a server is killed twice while it samples, at a rank of two trainer ranks; the run is never interrupted."""
    out, again = tmp_path / "a", tmp_path / "b"
    settings = [*SETTINGS, FILTERED, "engine.parallel.tp=2", *(f"rollout.server.{name}={n}" for name, n in server.items())]
    process = start(f"output={out}", *settings, "rollout.record=true")
    moment = in_turn(server_killed_after(1, out), server_killed_after(3, out))
    while process.poll() is None and not moment():
        time.sleep(0.01)
    printed, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, f"{printed[-3000:]}\n{err[-3000:]}"
    assert printed.count("is started again") + printed.count("starting it again") >= 2
    assert sum(row["servers/restarts"] for row in rows(out)) >= 2
    check_run(out)
    train(f"output={again}", *settings, f"rollout.replay={out / 'rollouts'}")
    check_replay(again, out)


def check_run(out: Path) -> None:
    """The record and the rows are whole, and each group of it is another problem's, with variance."""
    drawn = [rollout for step in range(STEPS) for rollout in read_rollouts(out / "rollouts", step)]
    groups = [drawn[first : first + 4] for first in range(0, len(drawn), 4)]
    assert len({group[0].problem_id for group in groups}) == len(groups) == 8 * STEPS
    assert all(len({rollout.reward for rollout in group}) > 1 for group in groups)
    assert [row["step"] for row in rows(out)] == list(range(STEPS + 1))
    for row in rows(out)[1:]:
        assert row["groups/filtered"] >= 0
        assert row["step"] - 1 - row["weights_version/min"] == row["staleness/max"] <= 2
        if row["weights_version/max"] == row["step"] - 1:
            assert row["canary/rollouts_mean_gap"] < 1e-5


def check_replay(again: Path, out: Path) -> None:
    """The same weights, and the same figures of the objective, to the last bit."""
    same_bytes(again, out, "model/model.safetensors")
    objective = ("loss", "grad_norm", "ratio/mean", "mismatch/kl", "ess", "staleness/mean", "staleness/versions", "reward/mean")
    for one, other in zip(rows(out)[1:], rows(again)[1:], strict=True):
        assert json.dumps([one[name] for name in objective]) == json.dumps([other[name] for name in objective])
