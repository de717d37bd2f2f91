"""Rewards of a step's rollouts. Rank 0 only."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tepo_megatron.config import RolloutConfig, RunConfig
from tepo_megatron.core.problem import ResponseText
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.runtime.user_code import line_of, load_user_code, plain
from tepo_megatron.tasks.protocol import RewardResult


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
                f"{len(failures)} of {len(results)} rewards of step {step + 1} failed, more than reward.max_failed = "
                f"{self._config.reward.max_failed:g} of them{self._cause}. Correct that, then resume (--resume), or "
                "start again if no step was trained"
            )
        rewarded = [result.of(rollout) for rollout, result in zip(rollouts, results, strict=True)]
        if failures:
            without = len(rewarded) - len(_trained_on(rewarded))
            counts_as = f" and count as reward.failed_reward = {self._config.reward.failed_reward or 0:g}"
            effect = f"; the step continues without {without} responses" if without else counts_as
            self._say(f"{self.failed} of {len(results)} rewards failed{effect}{self._cause}")
        return rewarded

    def leave_out(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Raises RuntimeError if what remains cannot be trained on."""
        remaining = _trained_on(rollouts)
        lowest = min((rollout.reward or 0.0 for rollout in remaining), default=0.0)
        if lowest < 0 and self._config.objective.advantage.kind == "divide_by_mean":
            raise RuntimeError(
                f"a reward of the step is {lowest:g}, and objective.advantage.kind = divide_by_mean divides by their mean, so "
                "that they must not be negative; shift them, or set another advantage"
            )
        self.failed = max(self.failed, sum(rollout.reward is None for rollout in rollouts))
        parts: dict[str, list[float]] = {}
        for rollout in remaining:
            for name, value in rollout.reward_parts.items():
                parts.setdefault(f"reward/{name}", []).append(value)
        self._components = {name: fmean(values) for name, values in parts.items()}
        self._dropped = len({rollout.group for rollout in rollouts} - {rollout.group for rollout in remaining})
        if len(remaining) < self._config.fewest_sequences and len(remaining) < len(rollouts):
            raise RuntimeError(
                f"{self.failed} of {len(rollouts)} rewards failed, and the {len(remaining)} responses in groups of two or more "
                f"that are left are too few for {_ranks(self._config)}{self._cause}"
            )
        return remaining

    def apply_overlong(self, rollouts: Sequence[Rollout], step: int) -> tuple[list[Rollout], dict[str, float]]:
        """Returns the rollouts with DAPO's punishment of long responses, and figures of cut ones. Raises RuntimeError if
        ``truncated: mask`` leaves too few.
        """
        config = self._config
        whole = sum(config.rollout.trains_on(rollout.finish_reason) for rollout in rollouts)
        if whole < config.fewest_sequences and whole < len(rollouts):
            raise RuntimeError(
                f"{len(rollouts) - whole} of the {len(rollouts)} responses of step {step + 1} were cut, and rollout.truncated "
                f"= mask trains on none of them: the {whole} others are too few for {_ranks(config)}; raise "
                "rollout.sampling.max_new_tokens, or set rollout.truncated = train"
            )
        penalised = [_penalised(rollout, config.rollout) for rollout in rollouts]
        figures = {"response_len/truncated": fmean(rollout.finish_reason == "length" for rollout in rollouts)}
        lost = [(after.reward or 0.0) - (before.reward or 0.0) for before, after in zip(rollouts, penalised, strict=True)]
        return penalised, figures | ({"reward/overlong": sum(lost) / len(lost)} if any(lost) else {})

    def take_figures(self) -> dict[str, float]:
        figures = {"reward/failed": float(self.failed), "groups/dropped": float(self._dropped), **self._components}
        self.failed, self._dropped, self._cause, self._components = 0, 0, "", {}
        return figures


def _ranks(config: RunConfig) -> str:
    parallel = config.engine.parallel
    stages = f" with engine.parallel.vpp = {parallel.vpp}" if parallel.vpp > 1 else ""
    return f"train.minibatches = {config.train.minibatches} on engine.parallel.dp = {parallel.dp} ranks{stages}"


def answer_of(rollout: Rollout) -> ResponseText:
    answer = ResponseText(rollout.text, rollout.response_ids, rollout.finish_reason)
    answer.prompt_ids = rollout.prompt_ids
    return answer


def _trained_on(rollouts: Sequence[Rollout]) -> list[Rollout]:
    before = Counter(rollout.group for rollout in rollouts)
    after = Counter(rollout.group for rollout in rollouts if rollout.reward is not None)
    whole = {group for group in after if after[group] >= min(2, before[group])}
    return [rollout for rollout in rollouts if rollout.reward is not None and rollout.group in whole]


def _penalised(rollout: Rollout, config: RolloutConfig) -> Rollout:
    """Computes DAPO's equation 13 (2503.14476): 0 up to ``max_new_tokens`` − ``buffer``, then linear to −``penalty``."""
    if (overlong := config.overlong) is None or rollout.reward is None:
        return rollout
    beyond = rollout.model_tokens - (config.sampling.max_new_tokens - overlong.buffer)
    if beyond <= 0:
        return rollout
    return replace(rollout, reward=rollout.reward - overlong.penalty * min(beyond / overlong.buffer, 1.0))


_NO_REWARD = "no_reward"  # the cause for a group with fewer than two rewards; not a filter's name


class GroupFilters:
    """The filters of ``rollout.filter_groups``, in order; false without any. They see only responses with a reward. Raises
    ValueError for a custom filter that cannot be loaded.
    """

    def __init__(self, config: RolloutConfig) -> None:
        names = () if config.filter_groups is None else config.filter_groups.filters
        self._filters = {name.rpartition(":")[2]: _filter(name, config) for name in names}
        self.causes = (*self._filters, _NO_REWARD) if self._filters else ()

    def __bool__(self) -> bool:
        return bool(self._filters)

    def refuse(self, group: Sequence[Rollout]) -> str | None:
        """Returns the cause, None for a kept group. Raises RuntimeError if a filter raises, or returns no boolean."""
        rewarded = [rollout for rollout in group if rollout.reward is not None]
        if self._filters and len(rewarded) < min(2, len(group)):
            return _NO_REWARD
        for name, keeps in self._filters.items():
            what = f"the filter {name} (rollout.filter_groups.filters)"
            problem = f"the group of problem {group[0].problem_id!r}"
            try:
                decision = plain(keeps(rewarded))
            except (Exception, SystemExit) as error:
                reason = f"{error}{line_of(error, keeps)}"
                raise RuntimeError(f"{what} raised {type(error).__name__} on {problem}: {reason}") from error
            if not isinstance(decision, bool):
                raise RuntimeError(f"{what} returned {decision!r} for {problem}; return True to keep it, or False")
            if not decision:
                return name
        return None


_Filter = Callable[[Sequence[Rollout]], bool]


def _filter(name: str, config: RolloutConfig) -> _Filter:
    settings = config.filter_groups
    assert settings is not None
    if name == "zero_variance":  # equal rewards make every advantage 0 (DAPO, "dynamic sampling")
        return lambda group: len({rollout.reward for rollout in group}) > 1
    if name == "too_long":
        most = settings.max_truncated or 0.0
        return lambda group: sum(rollout.finish_reason == "length" for rollout in group) <= most * len(group)
    if name == "reward_range":
        assert settings.reward_range is not None
        low, high = settings.reward_range
        return lambda group: low <= fmean(rollout.reward or 0.0 for rollout in group) <= high
    what = f"rollout.filter_groups.filters: {name}"
    function = load_user_code(name, what)
    if not callable(function):
        raise ValueError(f"{what} cannot be loaded: it is {type(function).__name__}, no function")
    return cast(_Filter, function)


def token_ages(rollout: Rollout, step: int) -> NDArray[np.int64]:
    starts = [start for start, _ in rollout.versions]
    ages = [step - version.step for _, version in rollout.versions]
    return np.repeat(ages, np.diff([*starts, len(rollout.response_ids)]))


def version_figures(rollouts: Sequence[Rollout], step: int) -> dict[str, float]:
    steps = [version.step for rollout in rollouts for _, version in rollout.versions]
    every = slice(None)
    ages = np.concatenate(
        [token_ages(rollout, step)[every if rollout.loss_mask is None else rollout.loss_mask] for rollout in rollouts]
    )
    return {
        "weights_version/min": float(min(steps)),
        "weights_version/max": float(max(steps)),
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/versions": sum(len(rollout.versions) for rollout in rollouts) / len(rollouts),
    }
