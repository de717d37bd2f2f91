"""A generation step of the user's own: what it draws and returns is checked, and a step that is repeated is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.errors import is_ours
from tepo_megatron.run.sampling.custom_rollout import StepSampler, load_collect
from tepo_megatron.sampler.protocol import ServerDied
from tests.support.fake_sampling import FakeFleet, FakeVerifiers, collector, run_steps

PROBLEMS = [Problem(f"p{number}", "q", "a") for number in range(6)]
SAMPLES = 2


def by_length(problem: Problem, text: str) -> float:
    return float(len(text) % 3)


SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"minibatches": 1},
    "overlap": {"minibatches": 1, "schedule": "overlap", "max_staleness": 2, "steps": 100},
}
BOTH = pytest.mark.parametrize("schedule", SCHEDULES)


def run_of(output: Path, collect: Any, fleet: FakeFleet, schedule: str = "sync", **rollout: Any) -> Any:
    sections = {"prompts_per_step": 3, "samples_per_prompt": SAMPLES, "collect": "mine.py:best", "uncorrected": True, **rollout}
    config = RunConfig.model_validate({"output": str(output), "rollout": sections, "train": SCHEDULES[schedule]})
    return collector(config, PROBLEMS, FakeVerifiers(0, by_length), fleet, collect=collect)


def collect_steps(of: Any, fleet: FakeFleet, steps: range) -> list[list[Rollout]]:
    try:
        return [rollouts for rollouts, _ in run_steps(of, fleet, steps)]
    finally:
        of.close()


def best_of_six(problems: Sequence[Problem], sampler: StepSampler) -> list[Rollout]:
    """The two of six with the largest reward."""
    found = []
    for group in sampler.sample(problems, n=6):
        found += sorted(sampler.reward(group), key=lambda rollout: -(rollout.reward or 0.0))[: sampler.samples]
    return found[::-1]  # their order does not matter


def key(rollouts: Sequence[Rollout]) -> list[Any]:
    return [(each.problem_id, each.group, each.response_ids.tolist(), each.reward) for each in rollouts]


@BOTH
def test_the_best_of_many_are_trained_on_and_a_killed_run_finds_them_again(schedule: str, tmp_path: Path) -> None:
    fleets = [FakeFleet(order) for order in (0, 7, 3)]
    first = run_of(tmp_path, best_of_six, fleets[0], schedule)
    steps = collect_steps(first, fleets[0], range(2))
    for rollouts in steps:
        assert [rollout.group for rollout in rollouts] == [0, 0, 1, 1, 2, 2]
        assert len({rollout.problem_id for rollout in rollouts}) == 3
    assert sum(rollout.reward or 0.0 for rollout in steps[0]) > 0
    scored = first._task.scored
    assert scored == 2 * 3 * 6 if schedule == "sync" else scored % (3 * 6) == 0  # nothing is scored twice

    def never(problems: Any, sampler: Any) -> list[Rollout]:
        raise AssertionError("the journal has the step")

    assert key(run_of(tmp_path, never, fleets[1], schedule).collect(0)) == key(steps[0])
    again = run_of(tmp_path / "other", best_of_six, fleets[2])  # of whatever schedule
    assert [key(rollouts) for rollouts in collect_steps(again, fleets[2], range(2))] == [key(rollouts) for rollouts in steps]


@BOTH
def test_a_server_that_dies_is_no_fault_of_the_function_and_the_step_is_repeated(schedule: str, tmp_path: Path) -> None:
    fleet = FakeFleet(0, dies_after=4, error=lambda: ServerDied("gone"))
    of = run_of(tmp_path, best_of_six, fleet, schedule, journal=False)
    with pytest.raises(ServerDied):
        of.collect(0)
    of.published(fleet.weights_version)
    whole = run_of(tmp_path, best_of_six, FakeFleet(5), journal=False)
    assert key(of.collect(0)) == key(whole.collect(0))
    of.close()


def test_what_has_no_reward_gets_one_and_a_reward_of_ones_own_stays(tmp_path: Path) -> None:
    def mine(problems: Sequence[Problem], sampler: StepSampler) -> list[Rollout]:
        groups = sampler.sample([replace(problem, prompt="qq") for problem in problems])  # another prompt, the same problem
        return [replace(rollout, reward=9.0 if at == 0 else None) for group in groups for at, rollout in enumerate(group)]

    of = run_of(tmp_path, mine, FakeFleet(0))
    rewards = [rollout.reward for rollout in of.collect(0)]
    assert rewards[::2] == [9.0] * 3
    assert max(rewards[1::2]) < 9.0
    assert of._task.scored == 3


def spoiled(**changes: Any) -> Any:
    """Changes the first rollout."""
    return lambda found: [replace(found[0], **changes), *found[1:]]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda found: found[1:], "returned 1 rollouts for problem 'p"),
        (lambda found: [*found, found[0]], "that the step did not ask for"),
        (spoiled(problem_id="other"), "returned 1 rollouts for problem"),
        (spoiled(response_ids=[99], sampler_logprobs=[-1.0]), "token 99 is not one of"),
        (spoiled(versions=WeightsVersion(3)), "drawn by the weights of step 3, not of step 0"),
        (spoiled(prompt_ids=[1, 2]), "different prompts"),
        (lambda found: None, "returned no list of rollouts in step 1"),
        (lambda found: [each.text for each in found], "returned no list of rollouts in step 1"),
        (lambda found: found[0].nothing, r"raised AttributeError in step 1: .*test_custom_rollout\.py:\d+\)"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_a_sentence(how: Any, says: str, tmp_path: Path) -> None:
    def mine(problems: Sequence[Problem], sampler: StepSampler) -> Any:
        return how([rollout for group in sampler.sample(problems) for rollout in group])

    of = run_of(tmp_path, mine, FakeFleet(0))
    with pytest.raises(RuntimeError, match=says) as caught:
        of.collect(0)
    of.close()
    assert is_ours(caught.value)
    assert "rollout.collect = mine.py:best" in str(caught.value)


def test_it_is_loaded_by_name_or_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Best:\n    def __call__(self, problems, sampler):\n        return []\nvalue = 3\n")
    config = load_run(None, [f"rollout.collect={tmp_path}/mine.py:Best"])
    loaded = load_collect(config)
    assert loaded is not None
    assert loaded([], None) == []
    assert load_collect(config, best_of_six) is best_of_six
    assert load_collect(RunConfig()) is None
    for name, says in (
        (f"{tmp_path}/mine.py:value", "cannot be called: it is int"),
        (f"{tmp_path}/mine.py:none", "has no function none"),
        ("(python):mine", r"give it again, tepo_megatron.train\(…, collect=…\)"),
    ):
        with pytest.raises(ValueError, match=says):
            load_collect(load_run(None, [f"rollout.collect='{name}'"]))
