"""What a step took of each source of problems, and how it was rewarded. Rank 0 only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout


def source_figures(rollouts: Sequence[Rollout], problems: Mapping[str, Problem]) -> dict[str, float]:
    """For each source by name: its share of the step's groups, and the mean reward of its responses, absent without any.

    Args:
        rollouts: those that a step trains on.
        problems: all of the run by their ids. Nothing is said where they are of one source without a name.
    """
    names = sorted({problem.source for problem in problems.values()} - {""})
    source_of = {
        rollout.problem_id: problems[rollout.problem_id].source for rollout in rollouts if rollout.problem_id in problems
    }
    groups = {rollout.group: source_of.get(rollout.problem_id) for rollout in rollouts}
    figures: dict[str, float] = {}
    for name in names:
        rewards = [each.reward for each in rollouts if source_of.get(each.problem_id) == name and each.reward is not None]
        figures[f"source/{name}/share"] = list(groups.values()).count(name) / len(groups) if groups else 0.0
        figures |= {f"source/{name}/reward": fmean(rewards)} if rewards else {}
    return figures
