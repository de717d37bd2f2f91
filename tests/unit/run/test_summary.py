"""Share and reward of each source in a step."""

from __future__ import annotations

from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.metrics.summary import source_figures


def rollout(problem: str, group: int, reward: float | None) -> Rollout:
    return Rollout(problem, group, (3,), (4,), (-0.5,), "stop", WeightsVersion(0, "ab"), reward=reward)


def test_shares_are_of_groups_and_rewards_of_responses() -> None:
    problems = {
        name: Problem(name, "q", "a", source=source)
        for name, source in (("a/1", "a"), ("a/2", "a"), ("b/1", "b"), ("c/1", "c"))
    }
    rollouts = [
        rollout("a/1", 0, 1.0),
        rollout("a/1", 0, 0.0),
        rollout("b/1", 1, 1.0),
        rollout("a/2", 2, 0.5),
        rollout("x", 3, 1.0),
    ]
    assert source_figures(rollouts, problems) == {
        "source/a/share": 0.5,
        "source/a/reward": 0.5,
        "source/b/share": 0.25,
        "source/b/reward": 1.0,
        "source/c/share": 0.0,
    }


def test_one_source_without_a_name_says_nothing() -> None:
    assert source_figures([rollout("a", 0, 1.0)], {"a": Problem("a", "q", "a")}) == {}
