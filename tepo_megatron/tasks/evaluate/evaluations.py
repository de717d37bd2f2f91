"""The held-out problems and the evaluation sets together, each with its verifier. Rank 0 only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tepo_megatron.config import RunConfig
from tepo_megatron.core.types import Problem
from tepo_megatron.tasks.data.tokenizer import Tokenizer
from tepo_megatron.tasks.environments.pool import EpisodePool
from tepo_megatron.tasks.evaluate.answers import Generate, Sampler, Scorer
from tepo_megatron.tasks.evaluate.evaluation import EvaluationResult, evaluate
from tepo_megatron.tasks.evaluate.sets import EvaluationSet, evaluate_set
from tepo_megatron.tasks.reward.by_source import Pool
from tepo_megatron.tasks.reward.pool import RewardPool


class VerifierPools:
    """The pool of the run's own verifier, which it does not close, and one for each other verifier that a set names; these have
    scored an answer. Sets are answered in one turn, also in a run whose own pool plays episodes. A context manager.

    Raises:
        ValueError: as ``RewardPool`` and its rehearsal, with the name of the set.
    """

    def __init__(self, config: RunConfig, sets: Sequence[EvaluationSet], own: Pool | EpisodePool) -> None:
        self.own = own
        self._own_name = None if isinstance(own, EpisodePool) else config.reward.verifier
        self._others: dict[str, RewardPool] = {}
        try:
            for each in sets:
                if each.verifier != self._own_name and each.verifier not in self._others:
                    self._open(config, each)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, verifier: str) -> Scorer:
        return self.own if verifier == self._own_name else self._others[verifier]

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
    tokenizer: Tokenizer,
    pools: VerifierPools,
    seed: Callable[[str], int],
    generate_heldout: Generate | None = None,
) -> EvaluationResult:
    """Evaluates the held-out problems, if there are any, and the sets, one after the other. ``seed`` gives a seed for each
    purpose; ``generate_heldout`` answers the held-out problems where not ``generate`` does. Raises as ``evaluate`` and
    ``evaluate_set``.
    """
    result = EvaluationResult({}, 0, 0, 0.0, 0, [])
    if heldout:
        result = evaluate(
            heldout,
            generate=generate_heldout or generate,
            tokenizer=tokenizer,
            pool=pools.own,
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
