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

STEPS = 20
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
    """Ten: two while it starts, the others when it has just written something: rollouts, a part of a checkpoint, a row."""
    expected, given = whole
    out = tmp_path / "killed"
    draw = random.Random(18)
    moments = [at_random(draw, out, starting=number in (3, 7)) for number in range(10)]
    printed = train_killed_at(moments, out, *given)
    print(printed)
    assert printed.count("takes the rollouts that were drawn before the interruption") >= 1
    assert_same_run(out, expected, checkpoint=STEPS)
    assert_none_names(out)


def at_random(draw: random.Random, out: Path, *, starting: bool) -> Moment:
    """Up to 20 s after the first question; or after one to eight changes of what is in the folder, and a moment more."""
    changes, wait_s = draw.randint(1, 8), draw.random() * (20 if starting else 0.1)
    seen: list[object] = []
    since: list[float] = []

    def moment() -> bool:
        if not starting and (not seen or seen[-1] != written(out)):
            seen.append(written(out))
        if not since and (starting or len(seen) > changes):
            since.append(time.monotonic())
        return bool(since) and time.monotonic() - since[0] >= wait_s

    return moment


def written(out: Path) -> tuple[list[str], int]:
    """Entries of the journal and checkpoints, and the size of the metrics."""
    names = sorted(path.name for folder in ("journal", "checkpoints") for path in (out / folder).glob("step_*"))
    return names, last_step(out)
