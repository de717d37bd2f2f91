"""Evaluation sets: named problems with their own verifier and sampling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.data import SourceConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.sampler.sampling import truncation_of
from tepo_megatron.tasks.data.prompts import encode_prompt
from tepo_megatron.tasks.data.rows import file_digest
from tepo_megatron.tasks.data.sources import read_source
from tepo_megatron.tasks.data.tokenizer import Tokenizer
from tepo_megatron.tasks.evaluate.answers import SampleGroups, Scored, Scorer, answers_row, mean_reward, score_groups
from tepo_megatron.tasks.evaluate.estimators import avg_at_k, maj_at_k, pass_at_k
from tepo_megatron.tasks.evaluate.majority import Notion, notion_of, tally_answers
from tepo_megatron.tasks.reward.verifiers import resolve_verifier


@dataclass(frozen=True)
class EvaluationSet:
    """``prompts``: token ids of each problem. ``truncation``: ``top_p`` and the like. ``notion``: how answers are compared;
    None: no maj@k. ``left_out``: problems with too long a prompt.
    """

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
class ProblemResult:
    """``greedy``, ``avg@n``, ``pass@k``, ``maj@k``, ``reward_greedy``, ``reward_sampled``, ``response_len`` and ``truncated``
    (share in [0, 1]), if they apply.
    """

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
    problems: Sequence[ProblemResult]
    metrics: dict[str, float]
    failures: int
    first_failure: str | None
    samples: list[dict[str, Any]]


def load_sets(config: RunConfig, tokenizer: Tokenizer, names: Iterable[str] | None = None) -> list[EvaluationSet]:
    """Raises ValueError for an unknown name, unreadable problems, or a prompt that cannot be encoded."""
    known = config.evaluate.sets
    chosen = list(known) if names is None else list(names)
    for name in chosen:
        if name not in known:
            raise ValueError(f"there is no set {name!r}; evaluate.sets has {', '.join(known) or 'none'}")
    return [_load_set(config, tokenizer, name) for name in chosen]


def _load_set(config: RunConfig, tokenizer: Tokenizer, name: str) -> EvaluationSet:
    settings, defaults, training = config.evaluate.sets[name], config.evaluate, config.rollout.sampling
    prompts = {field: getattr(settings, field) for field in ("template", "system_prompt", "chat_template", "fields", "split")}
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
    """Rank 0 only. Raises RuntimeError as ``generate`` and ``pool.score``."""
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
        ProblemResult(problem, one, several, _figures(of, one, several, tally))
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


def _mean_figures(results: Sequence[ProblemResult]) -> dict[str, float]:
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
