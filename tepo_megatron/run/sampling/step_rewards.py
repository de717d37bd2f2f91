"""The rewards of a step's rollouts, and the treatment of failed rewards and cut responses. Rank 0 only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from tepo_megatron.config import RolloutConfig, RunConfig
from tepo_megatron.config.sampling import OverlongConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.tasks.evaluate.answers import Scorer
from tepo_megatron.tasks.protocol import RewardResult, Task


def rehearsed(task: Task, config: RunConfig, problems: Sequence[Problem]) -> Task:
    """The run's task after its rehearsal, which a replayed run skips. Raises ValueError with the task closed."""
    try:
        if config.rollout.replay is None:
            task.rehearse(problems)
    except BaseException:
        task.close()
        raise
    return task


class StepRewards:
    """Rewards one step after another.

    Responses without a reward leave their group; a group that lost one and has fewer than two left leaves the step. They count
    in no statistic, denominator or metric.
    """

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
        """Raises RuntimeError if more than the share ``reward.max_failed`` failed."""
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
        """Returns the remaining rollouts with their groups' numbers. Raises RuntimeError if too few are left."""
        kept = _trained_on(rollouts)
        self.failed = max(self.failed, sum(rollout.reward is None for rollout in rollouts))
        self._components = _means_of_components(kept)
        self._dropped = len({rollout.group for rollout in rollouts} - {rollout.group for rollout in kept})
        minibatches, parallel = self._config.train.minibatches, self._config.engine.parallel
        if len(kept) < self._config.fewest_sequences and len(kept) < len(rollouts):
            stages = f" with engine.parallel.vpp = {parallel.vpp}" if parallel.vpp > 1 else ""
            raise RuntimeError(
                f"{self.failed} of {len(rollouts)} rewards failed, and the {len(kept)} responses in groups of two or more that "
                f"are left are too few for train.minibatches = {minibatches} on engine.parallel.dp = {parallel.dp} "
                f"ranks{stages}{self._cause}"
            )
        return kept

    def take_figures(self) -> dict[str, float]:
        figures = {"reward/failed": float(self.failed), "groups/dropped": float(self._dropped), **self._components}
        self.failed, self._dropped, self._cause, self._components = 0, 0, "", {}
        return figures

    def _consequence(self, rewarded: Sequence[Rollout]) -> str:
        without = len(rewarded) - len(_trained_on(rewarded))
        if without:
            return f"; the step goes on without {without} responses"
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
    """Returns DAPO's equation 13 (2503.14476): 0 up to ``max_new_tokens`` − ``buffer``, then linear to −``penalty``."""
    beyond = length - (max_new_tokens - overlong.buffer)
    return -overlong.penalty * min(max(beyond, 0) / overlong.buffer, 1.0)


def apply_overlong(rollouts: Sequence[Rollout], config: RunConfig, step: int) -> tuple[list[Rollout], dict[str, float]]:
    """The rollouts with the rewards to train on, and figures of cut responses. Raises RuntimeError if ``truncated: mask``
    leaves too few.
    """
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
