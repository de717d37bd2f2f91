"""The rewards of a step's rollouts: what could not be scored leaves the step, and too much of it ends the run. Rank 0 only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from tepo_megatron.config import RunConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.tasks.evaluate.answers import Scorer
from tepo_megatron.tasks.protocol import RewardResult, Task


def rehearsed(task: Task, config: RunConfig, problems: Sequence[Problem]) -> Task:
    """The run's task after its rehearsal, which a replayed run does not need. Raises ValueError with the task closed."""
    try:
        if config.rollout.replay is None:
            task.rehearse(problems)
    except BaseException:
        task.close()
        raise
    return task


class StepRewards:
    """Scores a step after another. What is left out is out of everything that follows: means and deviations of the groups,
    denominators, metrics.

    The rule: a response without a reward leaves its group; a group that has lost one and of which fewer than two are left
    leaves the step. With ``reward.failed_reward`` every response has a reward, and stays.
    """

    def __init__(self, config: RunConfig, pool: Scorer, say: Callable[[str], None]) -> None:
        """``say`` shows a sentence in the run's progress."""
        self._config, self._pool, self._say = config, pool, say
        self._cause = ""
        self._dropped = 0
        self._components: dict[str, float] = {}
        self.failed = 0
        """Responses of the step whose verifier failed."""

    def score(self, rollouts: Sequence[Rollout], problems: Sequence[Problem], step: int) -> list[Rollout]:
        """All rollouts of the step, as they are recorded; see :meth:`reward`. Waits for all rewards."""
        items = [(problems[rollout.group], answer_of(rollout)) for rollout in rollouts]
        return self.reward(rollouts, self._pool.score(items, [rollout.group for rollout in rollouts]), step)

    def reward(self, rollouts: Sequence[Rollout], results: Sequence[RewardResult], step: int) -> list[Rollout]:
        """The rollouts with their rewards, None where there is none; ``results`` has one for each.

        Raises RuntimeError where more than ``reward.max_failed`` of them failed.
        """
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
        """Those of a step's rollouts that are trained on, also of a recorded step; in their order, with their groups' numbers.

        Raises RuntimeError where too few are left for the step's mini-batches.
        """
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
        """Of the step that was just collected, for its row of metrics; they begin anew."""
        figures = {"reward/failed": float(self.failed), "groups/dropped": float(self._dropped), **self._components}
        self.failed, self._dropped, self._cause, self._components = 0, 0, "", {}
        return figures

    def _consequence(self, rewarded: Sequence[Rollout]) -> str:
        without = len(rewarded) - len(_trained_on(rewarded))
        if without:
            return f"; the step goes on without {without} responses"
        return f" and count as reward.failed_reward = {self._config.reward.failed_reward:g}"


def _means_of_components(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The mean of each component over the responses that have it, as a metric ``reward/<name>``."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.reward_parts)
    values = {name: [each.reward_parts[name] for each in rollouts if name in each.reward_parts] for name in names}
    return {f"reward/{name}": fmean(found) for name, found in values.items()}


def answer_of(rollout: Rollout) -> ResponseText:
    """What a verifier sees of a rollout."""
    return ResponseText(rollout.text, rollout.response_ids, rollout.finish_reason)


def _trained_on(rollouts: Sequence[Rollout]) -> list[Rollout]:
    before = Counter(rollout.group for rollout in rollouts)
    after = Counter(rollout.group for rollout in rollouts if rollout.reward is not None)
    whole = {group for group in after if after[group] >= min(2, before[group])}
    return [rollout for rollout in rollouts if rollout.reward is not None and rollout.group in whole]
