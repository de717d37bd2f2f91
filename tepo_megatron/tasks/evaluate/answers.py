"""Samples and scores responses to problems, for every evaluation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Response
from tepo_megatron.tasks.data.tokenizer import Tokenizer
from tepo_megatron.tasks.protocol import RewardResult

SampleGroups = Callable[..., Sequence[Sequence[Response]]]
"""``Sampler.generate``, with more keywords than ``Generate``: ``numbers`` (they determine seeds), ``on_group`` (called with a
prompt's index and its responses), ``top_p`` and others.
"""


class Scorer(Protocol):
    def score(self, items: Sequence[tuple[Problem, str]], groups: Sequence[Hashable]) -> list[RewardResult]: ...


@dataclass(frozen=True)
class Scored:
    """``num_tokens`` includes the end token."""

    text: str
    num_tokens: int
    finish_reason: str
    result: RewardResult
    correct: bool


def score_groups(
    problems: Sequence[Problem],
    groups: Sequence[Sequence[Response]],
    n: int,
    tokenizer: Tokenizer,
    pool: Scorer,
    correct_at: float,
) -> list[list[Scored]]:
    """Raises RuntimeError unless each problem has ``n`` responses."""
    if len(groups) != len(problems) or any(len(group) != n for group in groups):
        counts = sorted({len(group) for group in groups})
        raise RuntimeError(
            f"{n} responses to each of {len(problems)} prompts were asked for, the sampler returned {counts} to {len(groups)}"
        )
    responses = [response for group in groups for response in group]
    texts = [
        ResponseText(tokenizer.decode(response.response_ids.tolist()), response.response_ids, response.finish_reason)
        for response in responses
    ]
    owners = [(number, problem) for number, problem in enumerate(problems) for _ in range(n)]
    items = [(problem, text) for (_, problem), text in zip(owners, texts, strict=True)]
    results = pool.score(items, [number for number, _ in owners])
    scored = [
        Scored(text, len(response.response_ids), response.finish_reason, result, _is_correct(result, correct_at))
        for text, response, result in zip(texts, responses, results, strict=True)
    ]
    return [scored[index : index + n] for index in range(0, len(scored), n)]


def mean_reward(responses: Sequence[Scored]) -> float | None:
    results = [response.result for response in responses]
    rewards = [result.reward for result in results if result.error is None and result.reward is not None]
    return fmean(rewards) if rewards else None


def answers_row(problem: Problem, greedy: Scored | None, sampled: Sequence[Scored]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "problem": problem.id,
        "prompt": problem.prompt,
        "answer": problem.answer,
        **({} if greedy is None else {"greedy": _readable(greedy)}),
        "sampled": [_readable(response) for response in sampled],
        **({"source": problem.source} if problem.source else {}),
    }
    return row | ({"metadata": dict(problem.metadata)} if problem.metadata else {})


def _readable(response: Scored) -> dict[str, Any]:
    row: dict[str, Any] = {
        "response": response.text,
        "reward": response.result.reward,
        "correct": response.correct,
        "tokens": response.num_tokens,
        "finish_reason": response.finish_reason,
    }
    if response.result.parts:
        row["components"] = dict(response.result.parts)
    return row | ({"error": response.result.error} if response.result.error else {})


def _is_correct(result: RewardResult, correct_at: float) -> bool:
    """A failed response is not correct, whatever ``failed_reward`` is."""
    return result.error is None and result.reward is not None and result.reward >= correct_at
