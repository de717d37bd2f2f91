"""Filters of dynamic sampling.

A filter receives one group's rewarded rollouts, at least one, and returns whether to keep the group. Rewards are the
verifier's, without ``rollout.overlong``, so that lengths alone make no variance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

from tepo_megatron.config.sampling import FilterGroupsConfig
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.runtime.user_code import load_user_code

GroupFilter = Callable[[Sequence[Rollout]], bool]

NO_REWARD = "no_reward"
"""The cause for a group with fewer than two rewards; not a filter's name."""


def zero_variance(group: Sequence[Rollout]) -> bool:
    """Keeps a group if its rewards differ: equal ones make every advantage 0 (DAPO, "dynamic sampling")."""
    return len({rollout.reward for rollout in group}) > 1


def too_long(group: Sequence[Rollout], *, max_truncated: float) -> bool:
    """Keeps a group if at most this share was cut at ``rollout.sampling.max_new_tokens``."""
    return sum(rollout.finish_reason == "length" for rollout in group) <= max_truncated * len(group)


def reward_range(group: Sequence[Rollout], *, low: float, high: float) -> bool:
    """Keeps a group if its mean reward is from ``low`` to ``high``."""
    mean = sum(rollout.reward or 0.0 for rollout in group) / len(group)
    return low <= mean <= high


def load_filters(config: FilterGroupsConfig | None) -> dict[str, GroupFilter]:
    """Name → filter, in order. Raises ValueError for a custom filter that cannot be loaded."""
    if config is None:
        return {}
    built_in: dict[str, GroupFilter] = {"zero_variance": zero_variance}
    if config.max_truncated is not None:
        built_in["too_long"] = partial(too_long, max_truncated=config.max_truncated)
    if config.reward_range is not None:
        built_in["reward_range"] = partial(reward_range, low=config.reward_range[0], high=config.reward_range[1])
    return {_short(name): built_in.get(name) or _load(name) for name in config.filters}


def refused_by(filters: Mapping[str, GroupFilter], group: Sequence[Rollout]) -> str | None:
    """Returns None if the group is kept. Raises RuntimeError if a filter raises, or returns no boolean."""
    rewarded = [rollout for rollout in group if rollout.reward is not None]
    if len(rewarded) < min(2, len(group)):
        return NO_REWARD
    for name, keeps in filters.items():
        try:
            decision = keeps(rewarded)
        except Exception as error:
            raise RuntimeError(
                f"the filter {name} (rollout.filter_groups.filters) raised {type(error).__name__} on the group of problem "
                f"{group[0].problem_id!r}: {error}"
            ) from error
        if not isinstance(decision, bool):
            raise RuntimeError(
                f"the filter {name} (rollout.filter_groups.filters) returned {decision!r} for the group of problem "
                f"{group[0].problem_id!r}; return True to keep it, or False"
            )
        if not decision:
            return name
    return None


def histogram(counts: Mapping[float, int], bins: int = 10) -> str:
    """Values and counts, such as ``0 × 4980, 1 × 140``; ranges for more than ``bins`` values."""
    if not counts:
        return "none"
    if len(counts) <= bins:
        return ", ".join(f"{value:g} × {counts[value]}" for value in sorted(counts))
    low, high = min(counts), max(counts)
    width = (high - low) / bins
    totals = [0] * bins
    for value, count in counts.items():
        totals[min(int((value - low) / width), bins - 1)] += count
    edges = [low + width * index for index in range(bins + 1)]
    return ", ".join(f"{edges[index]:.3g} to {edges[index + 1]:.3g} × {total}" for index, total in enumerate(totals) if total)


def _short(name: str) -> str:
    return name.rpartition(":")[2]


def _load(name: str) -> GroupFilter:
    what = f"rollout.filter_groups.filters: {name}"
    function = load_user_code(name, what)
    if not callable(function):
        raise ValueError(f"{what} cannot be loaded: it is {type(function).__name__}, no function")
    return cast(GroupFilter, function)
