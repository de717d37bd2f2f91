"""Evaluates the held-out problems and the evaluation sets. Rank 0 only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.evaluate import EvaluateConfig
from tepo_megatron.config.sampling import SamplingConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.prompts import encode_prompt
from tepo_megatron.tasks.data.tokenizer import Tokenizer
from tepo_megatron.tasks.evaluate.answers import SampleGroups, Scored, Scorer, answers_row, mean_reward, score_groups
from tepo_megatron.tasks.evaluate.estimators import avg_at_k, pass_at_k
from tepo_megatron.tasks.evaluate.sets import EvaluationSet, SetResult, evaluate_set
from tepo_megatron.tasks.protocol import Generate, Task
from tepo_megatron.tasks.reward.pool import RewardPool


class VerifierPools:
    """The run's task if a set uses its verifier, else a pool that is rehearsed and closed here. Raises ValueError as
    ``RewardPool``.
    """

    def __init__(self, config: RunConfig, sets: Sequence[EvaluationSet], task: Task) -> None:
        self.task = task
        self._others: dict[str, RewardPool] = {}
        try:
            for evaluation_set in sets:
                if evaluation_set.verifier != task.verifier and evaluation_set.verifier not in self._others:
                    self._open(config, evaluation_set)
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

    def _open(self, config: RunConfig, evaluation_set: EvaluationSet) -> None:
        other = config.reward.model_copy(update={"verifier": evaluation_set.verifier, "kwargs": {}, "weights": None})
        try:
            pool = self._others[evaluation_set.verifier] = RewardPool(other)
            pool.rehearse(evaluation_set.problems)
        except ValueError as error:
            raise ValueError(f"evaluate.sets.{evaluation_set.name}: {error}") from error


def what_is_due(
    config: RunConfig, heldout: Sequence[Problem], sets: Sequence[EvaluationSet], step: int
) -> tuple[Sequence[Problem], list[EvaluationSet]]:
    evaluate, last = config.evaluate, config.train.steps
    due = [evaluation_set for evaluation_set in sets if evaluate.is_due(evaluation_set.name, step, last)]
    return heldout if evaluate.is_due(None, step, last) else (), due


def evaluate_all(
    config: RunConfig,
    heldout: Sequence[Problem],
    sets: Sequence[EvaluationSet],
    *,
    generate: SampleGroups,
    generate_heldout: Generate,
    tokenizer: Tokenizer,
    pools: VerifierPools,
    seed: Callable[[str], int],
) -> EvaluationResult:
    """``seed`` maps a purpose to a seed; ``generate_heldout`` answers the held-out problems, ``generate`` the sets."""
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
    set_results = tuple(
        evaluate_set(
            evaluation_set,
            generate=generate,
            tokenizer=tokenizer,
            pool=pools[evaluation_set.verifier],
            seed=seed(f"evaluate/{evaluation_set.name}"),
        )
        for evaluation_set in sets
    )
    return replace(
        result,
        metrics=result.metrics | {name: value for set_result in set_results for name, value in set_result.metrics.items()},
        failures=result.failures + sum(set_result.failures for set_result in set_results),
        first_failure=next(
            filter(None, [result.first_failure, *(set_result.first_failure for set_result in set_results)]), None
        ),
        samples=[*result.samples, *(row for set_result in set_results for row in set_result.samples)],
        sets=set_results,
    )


def what_failed(result: EvaluationResult) -> list[str]:
    heldout = result.failures - sum(set_result.failures for set_result in result.sets)
    counts = [("evaluation", heldout, result.first_failure)]
    counts += [
        (f"evaluation of {set_result.name}", set_result.failures, set_result.first_failure) for set_result in result.sets
    ]
    return [
        f"{what}: {count} responses could not be scored; they count as wrong; the first: {cause}"
        for what, count, cause in counts
        if count
    ]


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation.

    ``metrics``: ``accuracy/greedy``; if samples were drawn, ``accuracy/avg@k`` and ``accuracy/pass@k`` for ``k`` samples (0:
    greedy only); the mean rewards ``heldout/reward_greedy`` and ``heldout/reward_sampled`` if any response has one; and the
    metrics of ``sets``. ``mean_response_len``: tokens of the greedy responses including the end token. ``failures``: responses
    that the verifier could not score, which count as wrong; ``first_failure``: the first cause. ``samples``: rows of
    ``samples.jsonl``.
    """

    metrics: dict[str, float]
    k: int
    num_problems: int
    mean_response_len: float
    failures: int
    samples: list[dict[str, Any]]
    first_failure: str | None = None
    sets: tuple[SetResult, ...] = ()


def evaluate(
    problems: Sequence[Problem],
    *,
    generate: Generate,
    tokenizer: Tokenizer,
    pool: Scorer,
    config: EvaluateConfig,
    sampling: SamplingConfig,
    seed: int,
) -> EvaluationResult:
    """Rank 0 only. The first ``config.problems`` are used, so that evaluations are comparable. Raises ValueError: no problem,
    or a prompt that cannot be encoded.
    """
    chosen = list(problems[: config.problems])
    if not chosen:
        raise ValueError("there is no held-out problem to evaluate; give data.heldout, or set evaluate.every = 0")
    prompts = [encode_prompt(tokenizer, problem) for problem in chosen]

    def answer(n: int, temperature: float) -> list[list[Scored]]:
        groups = generate(prompts, n=n, temperature=temperature, max_new_tokens=sampling.max_new_tokens, seed=seed)
        return score_groups(chosen, groups, n, tokenizer, pool, config.correct_at)

    greedy = [group[0] for group in answer(1, 0.0)]
    sampled = answer(config.samples, sampling.temperature) if config.samples else [[] for _ in chosen]
    errors = [r.result.error for r in [*greedy, *(r for group in sampled for r in group)] if r.result.error is not None]
    return EvaluationResult(
        metrics={**_accuracies(greedy, sampled, config.samples), **_mean_rewards(greedy, sampled)},
        k=config.samples,
        num_problems=len(chosen),
        mean_response_len=fmean(response.num_tokens for response in greedy),
        failures=len(errors),
        samples=[answers_row(*shown) for shown in zip(chosen, greedy, sampled, strict=True)][: config.show],
        first_failure=errors[0] if errors else None,
    )


def _accuracies(greedy: Sequence[Scored], sampled: Sequence[Sequence[Scored]], k: int) -> dict[str, float]:
    metrics = {"accuracy/greedy": fmean(response.correct for response in greedy)}
    if k:
        num_correct = [sum(response.correct for response in group) for group in sampled]
        metrics["accuracy/avg@k"] = fmean(avg_at_k(k, c) for c in num_correct)
        metrics["accuracy/pass@k"] = fmean(pass_at_k(k, c, k) for c in num_correct)
    return metrics


def _mean_rewards(greedy: Sequence[Scored], sampled: Sequence[Sequence[Scored]]) -> dict[str, float]:
    """Of samples, the mean of each problem comes first, as in avg@k."""
    means = {}
    if (of_greedy := mean_reward(greedy)) is not None:
        means["heldout/reward_greedy"] = of_greedy
    if of_sampled := [mean for group in sampled if (mean := mean_reward(group)) is not None]:
        means["heldout/reward_sampled"] = fmean(of_sampled)
    return means
