"""The rewards of a step's rollouts: what could not be scored leaves the step, and too much of it ends the run. Rank 0 only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from tepo_megatron.config import RunConfig
from tepo_megatron.evaluate.evaluation import Scorer
from tepo_megatron.reward.pool import RewardPool
from tepo_megatron.types import Problem, Rollout


def ready_pool(config: RunConfig, problems: Sequence[Problem]) -> RewardPool:
    """The run's verifiers, which have scored an answer: ValueError if they cannot. A replayed run needs no reward."""
    pool = RewardPool(config.reward)
    try:
        if config.rollout.replay is None:
            pool.rehearse(problems)
    except BaseException:
        pool.close()
        raise
    return pool


class StepRewards:
    """Scores a step after another. What it leaves out is out of everything that follows: means and deviations of the groups,
    denominators, metrics, the record of rollouts.

    The rule: a response without a reward leaves its group; a group that has lost one and of which fewer than two are left
    leaves the step. With ``reward.failed_reward`` every response has a reward, and stays.
    """

    def __init__(self, config: RunConfig, pool: Scorer, say: Callable[[str], None]) -> None:
        """``say`` shows a sentence in the run's progress."""
        self._config, self._pool, self._say = config, pool, say
        self._failed = self._dropped = 0

    def score(self, rollouts: Sequence[Rollout], problems: Sequence[Problem], step: int) -> list[Rollout]:
        """The rollouts of the step that have a reward, with it; in their order, and with their groups' numbers as they were.

        Raises RuntimeError where more than ``reward.max_failed`` of them failed, or too few are left for its mini-batches.
        """
        results = self._pool.score([(problems[rollout.group], rollout.text) for rollout in rollouts])
        failures = [result.error for result in results if result.error]
        share = len(failures) / len(results)
        if share > self._config.reward.max_failed:
            raise RuntimeError(
                f"{len(failures)} of {len(results)} rewards of step {step} failed, more than reward.max_failed = "
                f"{self._config.reward.max_failed:g} of them; the first: {failures[0]}"
            )
        rewarded = [
            replace(rollout, reward=result.reward)
            for rollout, result in zip(rollouts, results, strict=True)
            if result.reward is not None
        ]
        kept = _without_broken_groups(rollouts, rewarded)
        self._failed = len(failures)
        self._dropped = len({rollout.group for rollout in rollouts} - {rollout.group for rollout in kept})
        if failures:
            self._say(f"{self._count(len(results), len(kept))}; the first: {failures[0]}")
        self._check_enough(len(kept), len(results), failures)
        return kept

    def figures(self) -> dict[str, float]:
        """Of the last step that was scored, for its row of metrics."""
        return {"reward/failed": float(self._failed), "groups/dropped": float(self._dropped)}

    def _count(self, total: int, kept: int) -> str:
        text = f"{self._failed} of {total} rewards failed"
        if kept == total:
            return f"{text} and count as reward.failed_reward = {self._config.reward.failed_reward:g}"
        groups = f", {self._dropped} of its groups among them" if self._dropped else ""
        return f"{text}; the step goes on without {total - kept} responses{groups}"

    def _check_enough(self, kept: int, total: int, failures: Sequence[str]) -> None:
        minibatches, dp = self._config.train.minibatches, self._config.engine.parallel.dp
        if kept < minibatches * dp and failures:
            raise RuntimeError(
                f"{len(failures)} of {total} rewards failed, and the {kept} responses in groups of two or more that are left "
                f"are too few for train.minibatches = {minibatches} on engine.parallel.dp = {dp} ranks; the first: "
                f"{failures[0]}"
            )


def _without_broken_groups(rollouts: Sequence[Rollout], rewarded: Sequence[Rollout]) -> list[Rollout]:
    before = Counter(rollout.group for rollout in rollouts)
    after = Counter(rollout.group for rollout in rewarded)
    return [rollout for rollout in rewarded if after[rollout.group] >= min(2, before[rollout.group])]
