"""The held-out problems and the evaluation sets together, each with its verifier. Rank 0 only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tepo_megatron.config import RunConfig
from tepo_megatron.core.types import Problem
from tepo_megatron.tasks.data.tokenizer import Tokenizer
from tepo_megatron.tasks.evaluate.answers import Sampler, Scorer
from tepo_megatron.tasks.evaluate.evaluation import EvaluationResult, evaluate
from tepo_megatron.tasks.evaluate.sets import EvaluationSet, evaluate_set
from tepo_megatron.tasks.protocol import Generate, Task
from tepo_megatron.tasks.reward.pool import RewardPool


class VerifierPools:
    """The scorer of each evaluation set: the run's task if the set names its verifier, else a pool of workers, rehearsed and
    closed here. Sets are answered in one turn, also if the task plays episodes. A context manager.

    Raises:
        ValueError: as ``RewardPool`` and its rehearsal, with the name of the set.
    """

    def __init__(self, config: RunConfig, sets: Sequence[EvaluationSet], task: Task) -> None:
        self.task = task
        self._others: dict[str, RewardPool] = {}
        try:
            for each in sets:
                if each.verifier != task.verifier and each.verifier not in self._others:
                    self._open(config, each)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, verifier: str) -> Scorer:
        return self.task if verifier == self.task.verifier else self._others[verifier]

    def close(self) -> None:
        for pool in self._others.values():
            pool.close()

    def __enter__(self) -> VerifierPools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, config: RunConfig, of: EvaluationSet) -> None:
        other = config.reward.model_copy(update={"verifier": of.verifier, "kwargs": {}, "weights": None})
        try:
            pool = self._others[of.verifier] = RewardPool(other)
            pool.rehearse(of.problems)
        except ValueError as error:
            raise ValueError(f"evaluate.sets.{of.name}: {error}") from error


def what_is_due(
    config: RunConfig, heldout: Sequence[Problem], sets: Sequence[EvaluationSet], step: int
) -> tuple[Sequence[Problem], list[EvaluationSet]]:
    """Of the held-out problems and the sets, those that are evaluated after ``step`` steps of a run."""
    evaluate, last = config.evaluate, config.train.steps
    due = [each for each in sets if evaluate.is_due(each.name, step, last)]
    return heldout if evaluate.is_due(None, step, last) else (), due


def evaluate_all(
    config: RunConfig,
    heldout: Sequence[Problem],
    sets: Sequence[EvaluationSet],
    *,
    generate: Sampler,
    generate_heldout: Generate,
    tokenizer: Tokenizer,
    pools: VerifierPools,
    seed: Callable[[str], int],
) -> EvaluationResult:
    """Evaluates the held-out problems, if there are any, and the sets, one after the other. ``seed`` maps a
    purpose to a seed; ``generate_heldout`` answers the held-out problems, ``generate`` the sets. Raises as ``evaluate`` and
    ``evaluate_set``.
    """
    result = EvaluationResult({}, 0, 0, 0.0, 0, [])
    if heldout:
        result = evaluate(
            heldout,
            generate=generate_heldout,
            tokenizer=tokenizer,
            pool=pools.task,
            config=config.evaluate,
            sampling=config.rollout.sampling,
            seed=seed("evaluate"),
        )
    found = tuple(
        evaluate_set(
            each, generate=generate, tokenizer=tokenizer, pool=pools[each.verifier], seed=seed(f"evaluate/{each.name}")
        )
        for each in sets
    )
    return replace(
        result,
        metrics=result.metrics | {name: value for each in found for name, value in each.metrics.items()},
        failures=result.failures + sum(each.failures for each in found),
        first_failure=next(filter(None, [result.first_failure, *(each.first_failure for each in found)]), None),
        samples=[*result.samples, *(row for each in found for row in each.samples)],
        sets=found,
    )


def what_failed(result: EvaluationResult) -> list[str]:
    """A sentence for the held-out problems and for each set where responses could not be scored."""
    heldout = result.failures - sum(each.failures for each in result.sets)
    counts = [("evaluation", heldout, result.first_failure)]
    counts += [(f"evaluation of {each.name}", each.failures, each.first_failure) for each in result.sets]
    return [
        f"{what}: {count} responses could not be scored; they count as wrong; the first: {cause}"
        for what, count, cause in counts
        if count
    ]
