"""Rewards of a step's rollouts. Rank 0 only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tepo_megatron.config import RolloutConfig, RunConfig
from tepo_megatron.config.rollout import FilterGroupsConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.runtime.user_code import load_user_code
from tepo_megatron.tasks.protocol import RewardResult, Task


def rehearsed(task: Task, config: RunConfig, problems: Sequence[Problem]) -> Task:
    """A replayed run skips the rehearsal. Raises ValueError with the task closed."""
    try:
        if config.rollout.replay is None:
            task.rehearse(problems)
    except BaseException:
        task.close()
        raise
    return task


class StepRewards:
    """Responses without a reward leave their group, and groups with fewer than two the step; they count in nothing."""

    def __init__(self, config: RunConfig, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self._cause = ""
        self._dropped = 0
        self._components: dict[str, float] = {}
        self.failed = 0

    def reward(self, rollouts: Sequence[Rollout], results: Sequence[RewardResult], step: int) -> list[Rollout]:
        """Raises RuntimeError above the share ``reward.max_failed``."""
        failures = [result.error for result in results if result.error]
        self.failed, self._cause = len(failures), f"; the first: {failures[0]}" if failures else ""
        if len(failures) / len(results) > self._config.reward.max_failed:
            raise RuntimeError(
                f"{len(failures)} of {len(results)} rewards of step {step} failed, more than reward.max_failed = "
                f"{self._config.reward.max_failed:g} of them{self._cause}"
            )
        rewarded = [
            replace(rollout, reward=result.reward, reward_parts=result.parts)
            for rollout, result in zip(rollouts, results, strict=True)
        ]
        if failures:
            self._say(f"{self.failed} of {len(results)} rewards failed{self._consequence(rewarded)}{self._cause}")
        return rewarded

    def leave_out(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        remaining = _trained_on(rollouts)
        self.failed = max(self.failed, sum(rollout.reward is None for rollout in rollouts))
        self._components = _means_of_components(remaining)
        self._dropped = len({rollout.group for rollout in rollouts} - {rollout.group for rollout in remaining})
        minibatches, parallel = self._config.train.minibatches, self._config.engine.parallel
        if len(remaining) < self._config.fewest_sequences and len(remaining) < len(rollouts):
            stages = f" with engine.parallel.vpp = {parallel.vpp}" if parallel.vpp > 1 else ""
            raise RuntimeError(
                f"{self.failed} of {len(rollouts)} rewards failed, and the {len(remaining)} responses in groups of two or more "
                f"that are left are too few for train.minibatches = {minibatches} on engine.parallel.dp = {parallel.dp} "
                f"ranks{stages}{self._cause}"
            )
        return remaining

    def take_figures(self) -> dict[str, float]:
        figures = {"reward/failed": float(self.failed), "groups/dropped": float(self._dropped), **self._components}
        self.failed, self._dropped, self._cause, self._components = 0, 0, "", {}
        return figures

    def _consequence(self, rewarded: Sequence[Rollout]) -> str:
        without = len(rewarded) - len(_trained_on(rewarded))
        if without:
            return f"; the step continues without {without} responses"
        return f" and count as reward.failed_reward = {self._config.reward.failed_reward:g}"


def _means_of_components(rollouts: Sequence[Rollout]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.reward_parts.items():
            values.setdefault(name, []).append(value)
    return {f"reward/{name}": fmean(parts) for name, parts in values.items()}


def answer_of(rollout: Rollout) -> ResponseText:
    return ResponseText(rollout.text, rollout.response_ids, rollout.finish_reason)


def _trained_on(rollouts: Sequence[Rollout]) -> list[Rollout]:
    before = Counter(rollout.group for rollout in rollouts)
    after = Counter(rollout.group for rollout in rollouts if rollout.reward is not None)
    whole = {group for group in after if after[group] >= min(2, before[group])}
    return [rollout for rollout in rollouts if rollout.reward is not None and rollout.group in whole]


def apply_overlong(rollouts: Sequence[Rollout], config: RunConfig, step: int) -> tuple[list[Rollout], dict[str, float]]:
    """Returns the rollouts with DAPO's punishment of long responses, and figures of cut ones.

    Raises RuntimeError if ``truncated: mask`` leaves too few.
    """
    rollout = config.rollout
    whole = len(trained_places(rollouts, rollout))
    if whole < config.fewest_sequences and whole < len(rollouts):
        raise RuntimeError(
            f"{len(rollouts) - whole} of the {len(rollouts)} responses of step {step} were cut at "
            f"rollout.sampling.max_new_tokens = {rollout.sampling.max_new_tokens}, and rollout.truncated = mask trains on none "
            f"of them: the {whole} others are too few for train.minibatches = {config.train.minibatches} on "
            f"engine.parallel.dp = {config.engine.parallel.dp} ranks; raise max_new_tokens, or set rollout.truncated = train"
        )
    penalties = [_penalty(rollout, config.rollout) for rollout in rollouts]
    penalised = [
        replace(rollout, reward=rollout.reward + penalty) if penalty and rollout.reward is not None else rollout
        for rollout, penalty in zip(rollouts, penalties, strict=True)
    ]
    figures = {"response_len/truncated": fmean(rollout.finish_reason == "length" for rollout in rollouts)}
    lost = [(after.reward or 0.0) - (before.reward or 0.0) for before, after in zip(rollouts, penalised, strict=True)]
    return penalised, figures | ({"reward/overlong": sum(lost) / len(lost)} if any(lost) else {})


def _penalty(rollout: Rollout, config: RolloutConfig) -> float:
    """DAPO's equation 13 (2503.14476): 0 up to ``max_new_tokens`` − ``buffer``, then linear to −``penalty``."""
    if (overlong := config.overlong) is None:
        return 0.0
    beyond = rollout.model_tokens - (config.sampling.max_new_tokens - overlong.buffer)
    return -overlong.penalty * min(max(beyond, 0) / overlong.buffer, 1.0)


def trained_places(rollouts: Sequence[Rollout], config: RolloutConfig) -> list[int]:
    masks = config.truncated == "mask"
    return [index for index, rollout in enumerate(rollouts) if not (masks and rollout.finish_reason == "length")]


NO_REWARD = "no_reward"  # the cause for a group with fewer than two rewards; not a filter's name


class GroupFilters:
    """The filters of ``rollout.filter_groups``, in order; false without any. They see the responses that have a reward.

    Raises ValueError for a custom filter that cannot be loaded.
    """

    def __init__(self, config: FilterGroupsConfig | None) -> None:
        self._config = config
        built_in = {"zero_variance": self._zero_variance, "too_long": self._too_long, "reward_range": self._reward_range}
        self._filters: dict[str, Callable[[Sequence[Rollout]], bool]] = {
            name.rpartition(":")[2]: built_in.get(name) or _load(name) for name in (() if config is None else config.filters)
        }
        self.causes = (*self._filters, NO_REWARD) if self._filters else ()

    def __bool__(self) -> bool:
        return bool(self._filters)

    def refuse(self, group: Sequence[Rollout]) -> str | None:
        """Returns the cause; None if the group is kept. Raises RuntimeError if a filter raises, or returns no boolean."""
        rewarded = [rollout for rollout in group if rollout.reward is not None]
        if self._filters and len(rewarded) < min(2, len(group)):
            return NO_REWARD
        for name, keeps in self._filters.items():
            what = f"the filter {name} (rollout.filter_groups.filters)"
            problem = f"the group of problem {group[0].problem_id!r}"
            try:
                decision = keeps(rewarded)
            except Exception as error:
                raise RuntimeError(f"{what} raised {type(error).__name__} on {problem}: {error}") from error
            if not isinstance(decision, bool):
                raise RuntimeError(f"{what} returned {decision!r} for {problem}; return True to keep it, or False")
            if not decision:
                return name
        return None

    def _zero_variance(self, group: Sequence[Rollout]) -> bool:
        """Equal rewards make every advantage 0 (DAPO, "dynamic sampling")."""
        return len({rollout.reward for rollout in group}) > 1

    def _too_long(self, group: Sequence[Rollout]) -> bool:
        assert self._config is not None
        assert self._config.max_truncated is not None
        return sum(rollout.finish_reason == "length" for rollout in group) <= self._config.max_truncated * len(group)

    def _reward_range(self, group: Sequence[Rollout]) -> bool:
        assert self._config is not None
        assert self._config.reward_range is not None
        low, high = self._config.reward_range
        return low <= sum(rollout.reward or 0.0 for rollout in group) / len(group) <= high


def _load(name: str) -> Callable[[Sequence[Rollout]], bool]:
    what = f"rollout.filter_groups.filters: {name}"
    function = load_user_code(name, what)
    if not callable(function):
        raise ValueError(f"{what} cannot be loaded: it is {type(function).__name__}, no function")
    return cast(Callable[[Sequence[Rollout]], bool], function)


def most_stale(config: RunConfig, step: int) -> int:
    train = config.train
    if train.schedule == "sync":
        return step if config.rollout.oversample > 1 else 0  # groups carried over may be of any age
    return train.max_staleness if train.stale == "drop" else step


def token_ages(rollout: Rollout, step: int) -> NDArray[np.int64]:
    starts = [start for start, _ in rollout.versions]
    ages = [step - version.step for _, version in rollout.versions]
    return np.repeat(ages, np.diff([*starts, len(rollout.response_ids)]))


def version_figures(rollouts: Sequence[Rollout], step: int) -> dict[str, float]:
    steps = [version.step for rollout in rollouts for _, version in rollout.versions]
    ages = np.concatenate([_model_ages(rollout, step) for rollout in rollouts])
    return {
        "weights_version/min": float(min(steps)),
        "weights_version/max": float(max(steps)),
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/versions": sum(len(rollout.versions) for rollout in rollouts) / len(rollouts),
    }


def _model_ages(rollout: Rollout, step: int) -> NDArray[np.int64]:
    ages = token_ages(rollout, step)
    return ages if rollout.loss_mask is None else ages[rollout.loss_mask]
