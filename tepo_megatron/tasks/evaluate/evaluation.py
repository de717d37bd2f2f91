"""Evaluates held-out problems and evaluation sets on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.data import EvaluateConfig, SourceConfig
from tepo_megatron.config.rollout import SamplingConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.sampler.sampling import truncation_of
from tepo_megatron.tasks.data.problems import encode_prompt
from tepo_megatron.tasks.data.rows import file_digest
from tepo_megatron.tasks.data.sources import read_source
from tepo_megatron.tasks.data.tokenizer import Tokenizer
from tepo_megatron.tasks.evaluate.answers import (
    Notion,
    SampleGroups,
    Scored,
    Scorer,
    answers_row,
    mean_reward,
    notion_of,
    score_groups,
    tally_answers,
)
from tepo_megatron.tasks.evaluate.estimators import avg_at_k, maj_at_k, pass_at_k
from tepo_megatron.tasks.protocol import Generate, Task
from tepo_megatron.tasks.reward.pool import RewardPool
from tepo_megatron.tasks.reward.verifiers import resolve_verifier


class VerifierPools:
    """Returns the run's task if it uses the set's verifier, else a pool, which is closed here."""

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
    """``seed``: purpose → seed. ``generate`` answers the sets."""
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

    ``metrics``: ``accuracy/greedy``; with samples, ``accuracy/avg@k`` and ``accuracy/pass@k`` for ``k`` samples (0: greedy
    only); the mean rewards ``heldout/reward_greedy`` and ``heldout/reward_sampled``; and the metrics of ``sets``.
    ``mean_response_len``: tokens of greedy responses, with the end token. ``failures``: responses that could not be scored and
    count as wrong; ``first_failure``: the first cause. ``samples``: rows of ``samples.jsonl``.
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
    """Uses the first ``config.problems``, so that evaluations are comparable. Raises ValueError without problems."""
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
    """Averages each problem's samples first, as avg@k."""
    means = {}
    if (of_greedy := mean_reward(greedy)) is not None:
        means["heldout/reward_greedy"] = of_greedy
    if of_sampled := [mean for group in sampled if (mean := mean_reward(group)) is not None]:
        means["heldout/reward_sampled"] = fmean(of_sampled)
    return means


@dataclass(frozen=True)
class EvaluationSet:
    """``notion`` None: no maj@k. ``left_out``: problems with too long a prompt."""

    name: str
    problems: tuple[Problem, ...]
    prompts: tuple[tuple[int, ...], ...]
    left_out: int
    verifier: str
    greedy: bool
    samples: int
    ks: tuple[int, ...]
    temperature: float
    max_new_tokens: int
    truncation: Mapping[str, Any]
    notion: Notion | None
    correct_at: float
    show: int


@dataclass(frozen=True)
class _ProblemResult:
    """``greedy``, ``avg@n``, ``pass@k``, ``maj@k`` and others, if they apply."""

    problem: Problem
    greedy: Scored | None
    sampled: Sequence[Scored]
    figures: dict[str, float]

    @property
    def responses(self) -> list[Scored]:
        return [*([] if self.greedy is None else [self.greedy]), *self.sampled]


@dataclass(frozen=True)
class SetResult:
    """``metrics``: ``eval/NAME/…``, means over the problems that have the figure. ``samples``: rows of ``samples.jsonl``."""

    name: str
    problems: Sequence[_ProblemResult]
    metrics: dict[str, float]
    failures: int
    first_failure: str | None
    samples: list[dict[str, Any]]


def load_sets(config: RunConfig, tokenizer: Tokenizer, names: Iterable[str] | None = None) -> list[EvaluationSet]:
    """Raises ValueError for unusable problems."""
    known = config.evaluate.sets
    chosen = list(known) if names is None else list(names)
    for name in chosen:
        if name not in known:
            raise ValueError(f"there is no set {name!r}; evaluate.sets has {', '.join(known) or 'none'}")
    return [_load_set(config, tokenizer, name) for name in chosen]


def _load_set(config: RunConfig, tokenizer: Tokenizer, name: str) -> EvaluationSet:
    settings, defaults, training = config.evaluate.sets[name], config.evaluate, config.rollout.sampling
    inherited = ("template", "system_prompt", "chat_template", "special_tokens", "fields", "split")
    prompts = {field: getattr(settings, field) for field in inherited}
    if settings.sha256 is not None and (digest := file_digest(Path(settings.path))) != settings.sha256:
        raise ValueError(
            f"evaluate.sets.{name}.sha256 = {settings.sha256}, but {settings.path} has {digest}: it was changed; restore it, "
            "or give its own digest"
        )
    try:
        source = read_source(
            config.data, config.data.complete(SourceConfig(path=settings.path, **prompts), filtered=False), tokenizer
        )
    except ValueError as error:
        raise ValueError(f"evaluate.sets.{name}: {error}") from error
    problems = source.used[: settings.problems]
    samples = defaults.samples if settings.samples is None else settings.samples
    verifier = settings.verifier or config.reward.verifier
    resolve_verifier(verifier)
    sampling = settings.sampling
    return EvaluationSet(
        name=name,
        problems=tuple(problems),
        prompts=tuple(encode_prompt(tokenizer, problem) for problem in problems),
        left_out=source.left_out.total(),
        verifier=verifier,
        greedy=settings.greedy,
        samples=samples,
        ks=tuple(sorted((samples,) if settings.k is None else settings.k)) if samples else (),
        temperature=training.temperature if sampling.temperature is None else sampling.temperature,
        max_new_tokens=sampling.max_new_tokens or training.max_new_tokens,
        truncation={**truncation_of(training), **sampling.truncation},
        notion=notion_of(settings.majority, verifier),
        correct_at=defaults.correct_at if settings.correct_at is None else settings.correct_at,
        show=defaults.show if settings.show is None else settings.show,
    )


def evaluate_set(of: EvaluationSet, *, generate: SampleGroups, tokenizer: Tokenizer, pool: Scorer, seed: int) -> SetResult:
    prompts, problems = list(of.prompts), of.problems

    def answer(n: int, temperature: float, truncation: Mapping[str, Any]) -> list[list[Scored]]:
        length = of.max_new_tokens
        groups = generate(prompts, n=n, temperature=temperature, max_new_tokens=length, seed=seed, **truncation)
        return score_groups(problems, groups, n, tokenizer, pool, of.correct_at)

    greedy: list[Scored | None] = [group[0] for group in answer(1, 0.0, {})] if of.greedy else [None] * len(problems)
    sampled = answer(of.samples, of.temperature, of.truncation) if of.samples else [[] for _ in problems]
    return _set_result(of, greedy, sampled, pool)


def _set_result(
    of: EvaluationSet, greedy: Sequence[Scored | None], sampled: Sequence[Sequence[Scored]], pool: Scorer
) -> SetResult:
    tallies: Sequence[list[tuple[int, int]] | None] = [None] * len(of.problems)
    if of.notion is not None and of.samples:
        tallies = tally_answers(
            of.problems, sampled, verifier=of.verifier, notion=of.notion, pool=pool, correct_at=of.correct_at
        )
    results = [
        _ProblemResult(problem, one, several, _figures(of, one, several, tally))
        for problem, one, several, tally in zip(of.problems, greedy, sampled, tallies, strict=True)
    ]
    errors = [response.result.error for result in results for response in result.responses if response.result.error is not None]
    return SetResult(
        of.name,
        results,
        {f"eval/{of.name}/{name}": mean for name, mean in (_mean_figures(results) | {"failed": float(len(errors))}).items()},
        len(errors),
        errors[0] if errors else None,
        [{"set": of.name, **answers_row(result.problem, result.greedy, result.sampled)} for result in results[: of.show]],
    )


def _mean_figures(results: Sequence[_ProblemResult]) -> dict[str, float]:
    names = dict.fromkeys(name for result in results for name in result.figures)
    return {name: fmean(result.figures[name] for result in results if name in result.figures) for name in names}


def _figures(
    of: EvaluationSet, greedy: Scored | None, sampled: Sequence[Scored], tally: Sequence[tuple[int, int]] | None
) -> dict[str, float]:
    results: dict[str, float] = {}
    if greedy is not None:
        results["greedy"] = float(greedy.correct)
    if sampled:
        right = sum(response.correct for response in sampled)
        results[f"avg@{of.samples}"] = avg_at_k(of.samples, right)
        results |= {f"pass@{k}": pass_at_k(of.samples, right, k) for k in of.ks}
        if tally is not None:
            results |= {f"maj@{k}": maj_at_k(tally, of.samples, k) for k in of.ks if k > 1}
    means = {"reward_greedy": mean_reward([] if greedy is None else [greedy]), "reward_sampled": mean_reward(sampled)}
    results |= {name: mean for name, mean in means.items() if mean is not None}
    responses = sampled or ([] if greedy is None else [greedy])
    results["response_len"] = fmean(response.num_tokens for response in responses)
    results["truncated"] = fmean(response.finish_reason == "length" for response in responses)
    return results
