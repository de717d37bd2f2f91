"""Runs with real servers, killed by SIGKILL after each step and at random moments, end in the same bits: pytest -m faults.

Half an hour and more on two cores, so scripts/test.sh leaves it out; test_training_run.py kills one run twice.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.support.kills import Moment, assert_same_run, last_step, train, train_killed_at
from tests.support.processes import assert_none_names

pytestmark = [pytest.mark.faults, pytest.mark.timeout(4 * 3600)]

STEPS = 12
SMALL = [
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.sampling.max_new_tokens=16",
    "rollout.canary.every=3",
    "rollout.record=true",
    "evaluate.problems=4",
    "evaluate.samples=2",
    "evaluate.every=3",
    "engine.noise_every=4",
    f"train.steps={STEPS}",
    "train.minibatches=2",
    "train.save_every=2",
    "train.keep_checkpoints=3",
    "log.progress=plain",
]
LAYOUTS = {
    "tp2": ["engine.parallel.tp=2"],
    "tp2-pp2-distributed": ["engine.parallel.tp=2", "engine.parallel.pp=2", "optimizer.distributed=true"],
}


@pytest.fixture(scope="module", params=LAYOUTS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run that nothing happened to, and what it was given."""
    given = [*SMALL, *LAYOUTS[request.param]]
    out = tmp_path_factory.mktemp("whole") / "out"
    train(f"output={out}", *given)
    return out, given


def test_killed_after_each_of_the_first_steps(whole: tuple[Path, list[str]], tmp_path: Path) -> None:
    """After the first there is no checkpoint yet: the run starts anew."""
    expected, given = whole
    out = tmp_path / "killed"
    moments = [lambda step=step: last_step(out) >= step for step in range(1, 6)]
    printed = train_killed_at(moments, out, *given)
    assert printed.count("resumed from") == 4
    assert "takes the rollouts that were drawn before the interruption" in printed
    assert_same_run(out, expected, checkpoint=STEPS)
    assert_none_names(out)


def test_killed_at_random_moments(whole: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Ten: some while it starts, most while it steps, so often that a checkpoint, a row or an entry is cut now and then."""
    expected, given = whole
    out = tmp_path / "killed"
    draw = random.Random(18)
    moments = [at_random(draw, out, step) for step in sorted(draw.randrange(STEPS - 3) for _ in range(10))]
    print(train_killed_at(moments, out, *given))
    assert_same_run(out, expected, checkpoint=STEPS)
    assert_none_names(out)


def at_random(draw: random.Random, out: Path, step: int) -> Moment:
    """Some time after a step; one in four times counts from the start of the process instead."""
    starting, wait_s = draw.random() < 0.25, draw.random()
    since: list[float] = []

    def moment() -> bool:
        if starting or last_step(out) >= step:
            since.append(time.monotonic())
        return bool(since) and time.monotonic() - since[0] >= wait_s * (20 if starting else 2)

    return moment
