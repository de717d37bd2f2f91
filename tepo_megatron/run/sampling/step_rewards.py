"""Rewards of a step's rollouts. Rank 0 only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tepo_megatron.config import RolloutConfig, RunConfig
from tepo_megatron.config.rollout import FilterGroupsConfig, OverlongConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.core.types import Batch
from tepo_megatron.run.step.minibatches import members
from tepo_megatron.runtime.user_code import load_user_code
from tepo_megatron.tasks.evaluate.answers import Scorer
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

    def __init__(self, config: RunConfig, pool: Scorer, say: Callable[[str], None]) -> None:
        self._config, self._pool, self._say = config, pool, say
        self._cause = ""
        self._dropped = 0
        self._components: dict[str, float] = {}
        self.failed = 0

    def score(self, rollouts: Sequence[Rollout], problems: Sequence[Problem], step: int) -> list[Rollout]:
        items = [(problems[rollout.group], answer_of(rollout)) for rollout in rollouts]
        return self.reward(rollouts, self._pool.score(items, [rollout.group for rollout in rollouts]), step)

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


def overlong_penalty(length: int, max_new_tokens: int, overlong: OverlongConfig) -> float:
    """DAPO's equation 13 (2503.14476): 0 up to ``max_new_tokens`` − ``buffer``, then linear to −``penalty``."""
    beyond = length - (max_new_tokens - overlong.buffer)
    return -overlong.penalty * min(max(beyond, 0) / overlong.buffer, 1.0)


def apply_overlong(rollouts: Sequence[Rollout], config: RunConfig, step: int) -> tuple[list[Rollout], dict[str, float]]:
    """Raises RuntimeError if ``truncated: mask`` leaves too few."""
    _check_enough(rollouts, config, step)
    penalised = _penalise(rollouts, config.rollout)
    return penalised, _cut_figures(rollouts, penalised)


def _penalise(rollouts: Sequence[Rollout], config: RolloutConfig) -> list[Rollout]:
    if config.overlong is None:
        return list(rollouts)
    most = config.sampling.max_new_tokens
    penalties = [overlong_penalty(rollout.model_tokens, most, config.overlong) for rollout in rollouts]
    return [
        replace(rollout, reward=rollout.reward + penalty) if penalty and rollout.reward is not None else rollout
        for rollout, penalty in zip(rollouts, penalties, strict=True)
    ]


def trained_places(rollouts: Sequence[Rollout], config: RolloutConfig) -> list[int]:
    masks = config.truncated == "mask"
    return [index for index, rollout in enumerate(rollouts) if not (masks and rollout.finish_reason == "length")]


def _check_enough(rollouts: Sequence[Rollout], config: RunConfig, step: int) -> None:
    whole = len(trained_places(rollouts, config.rollout))
    if whole < config.fewest_sequences and whole < len(rollouts):
        raise RuntimeError(
            f"{len(rollouts) - whole} of the {len(rollouts)} responses of step {step} were cut at "
            f"rollout.sampling.max_new_tokens = {config.rollout.sampling.max_new_tokens}, and rollout.truncated = mask trains "
            f"on none of them: the {whole} others are too few for train.minibatches = {config.train.minibatches} on "
            f"engine.parallel.dp = {config.engine.parallel.dp} ranks; raise max_new_tokens, or set rollout.truncated = train"
        )


def _cut_figures(rollouts: Sequence[Rollout], penalised: Sequence[Rollout]) -> dict[str, float]:
    cut = sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts)
    row = {"response_len/truncated": cut}
    pairs = zip(rollouts, penalised, strict=True)
    penalties = [(after.reward or 0.0) - (before.reward or 0.0) for before, after in pairs]
    if any(penalties):
        row["reward/overlong"] = sum(penalties) / len(penalties)
    return row


GroupFilter = Callable[[Sequence[Rollout]], bool]

NO_REWARD = "no_reward"  # the cause for a group with fewer than two rewards; not a filter's name


def zero_variance(group: Sequence[Rollout]) -> bool:
    """Equal rewards make every advantage 0 (DAPO, "dynamic sampling")."""
    return len({rollout.reward for rollout in group}) > 1


def too_long(group: Sequence[Rollout], *, max_truncated: float) -> bool:
    return sum(rollout.finish_reason == "length" for rollout in group) <= max_truncated * len(group)


def reward_range(group: Sequence[Rollout], *, low: float, high: float) -> bool:
    mean = sum(rollout.reward or 0.0 for rollout in group) / len(group)
    return low <= mean <= high


def load_filters(config: FilterGroupsConfig | None) -> dict[str, GroupFilter]:
    """Raises ValueError for a custom filter that cannot be loaded."""
    if config is None:
        return {}
    built_in: dict[str, GroupFilter] = {"zero_variance": zero_variance}
    if config.max_truncated is not None:
        built_in["too_long"] = partial(too_long, max_truncated=config.max_truncated)
    if config.reward_range is not None:
        built_in["reward_range"] = partial(reward_range, low=config.reward_range[0], high=config.reward_range[1])
    return {_short(name): built_in.get(name) or _load(name) for name in config.filters}


def refused_by(filters: Mapping[str, GroupFilter], group: Sequence[Rollout]) -> str | None:
    """None if the group is kept. Raises RuntimeError if a filter raises, or returns no boolean."""
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
    """For example ``0 × 4980, 1 × 140``; ranges for more than ``bins`` values."""
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


def part_ages(
    rollouts: Sequence[Rollout], parts: Sequence[Batch], *, seed: int, step: int, trained: Sequence[int] | None = None
) -> list[Tensor]:
    """int64 [T] per mini-batch; −1 for tokens that are not the model's response.

    ``rollouts``: the whole step in packing order. ``trained``: indices of those in the mini-batches; None: all.
    """
    ages = []
    sequences = len(rollouts) if trained is None else trained
    for part, chosen in zip(parts, members(sequences, len(parts), seed=seed, step=step), strict=True):
        ages_T = torch.full_like(part.labels_T, -1)
        for first, index in zip(part.cu_seqlens.tolist(), chosen, strict=False):
            first += len(rollouts[index].prompt_ids) - 1  # the last prompt token's label is the first of the response
            response_ages = torch.from_numpy(token_ages(rollouts[index], step)).to(ages_T)
            ages_T[first : first + response_ages.numel()] = response_ages
        ages_T[~part.loss_mask_T] = -1  # no weights drew an environment's tokens
        ages.append(ages_T)
    return ages


def mismatch_by_age(parts: Sequence[Batch], ages: Sequence[Tensor]) -> dict[str, float]:
    """KL(π_sampler‖π_old) by k3, over the tokens of each age with a finite log-prob of the trainer."""
    gaps, olds = [], []
    for part, ages_T in zip(parts, ages, strict=True):
        assert part.old_logprobs_T is not None
        gap_T = (part.old_logprobs_T - part.sampler_logprobs_T).double()
        counted_T = part.loss_mask_T & gap_T.isfinite()
        gaps.append(gap_T[counted_T])
        olds.append(ages_T[counted_T])
    gap, age = torch.cat(gaps), torch.cat(olds)
    kl = torch.expm1(gap) - gap
    return {f"staleness/kl_{value}": float(kl[age == value].mean()) for value in age.unique().tolist()}
