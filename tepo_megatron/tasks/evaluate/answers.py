"""Samples, scores and compares responses to problems, for every evaluation."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from itertools import combinations
from statistics import fmean
from typing import Any, Literal, Protocol

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Response
from tepo_megatron.tasks.data.tokenizer import Tokenizer
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.verifiers import last_number_in

SampleGroups = Callable[..., Sequence[Sequence[Response]]]  # Sampler.generate; its numbers determine seeds


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
    """A failed response is wrong, whatever ``failed_reward`` is."""
    return result.error is None and result.reward is not None and result.reward >= correct_at


Notion = Literal["verifier", "text"]
Tallies = list[list[tuple[int, int]]]  # per problem: (responses, correct ones) of each distinct answer

_ANNOUNCED = re.compile(r"(?:answer|result|solution)\s*(?:is|:|=)\s*:?\s*", re.I)
_LONGEST = 100
_SIMPLE_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def notion_of(majority: str, verifier: str) -> Notion | None:
    """None: no maj@k."""
    if majority == "auto" and verifier in ("python_tests", "stack_machine"):
        return None  # programs with equal results rarely have equal texts
    if majority == "auto":
        return "verifier" if verifier in ("exact", "last_word", "last_number", "math") else "text"
    return None if majority == "none" else "verifier" if majority == "verifier" else "text"


def tally_answers(
    problems: Sequence[Problem],
    groups: Sequence[Sequence[Scored]],
    *,
    verifier: str,
    notion: Notion,
    pool: Scorer,
    correct_at: float,
) -> Tallies:
    """Responses without a final answer are left out; numbers compare by value. If the verifier compares, correct answers are
    equal, and two others are equal if one is correct when the other is expected.
    """
    answers = [[final_answer(response.text, verifier) for response in group] for group in groups]
    classes_by_problem = [_classes(texts) for texts in answers]
    if notion == "verifier":
        if verifier not in ("exact", "last_word", "last_number"):  # their final answer is the whole comparison
            _join_what_the_verifier_takes_for_the_same(problems, groups, answers, classes_by_problem, pool, correct_at)
        for classes, group, texts in zip(classes_by_problem, groups, answers, strict=True):
            right = [answer for answer, response in zip(texts, group, strict=True) if answer is not None and response.correct]
            for one in right[1:]:
                _join(classes, right[0], one)
    return [_tally(*counts) for counts in zip(groups, answers, classes_by_problem, strict=True)]


def final_answer(text: str, verifier: str) -> str | None:
    r"""What exact, last_word and last_number compare; else the last ``\boxed{…}``, the line after the last "answer is", the
    last number (math), or the last line.
    """
    if verifier == "exact":
        return text.strip() or None
    if verifier == "last_word":
        words = text.split()
        return words[-1] if words else None
    if verifier == "last_number":
        number = last_number_in(text)
        return None if number is None else _plain_number(number)
    boxed = _last_boxed(text)
    if boxed is not None:
        return _normalised(boxed)
    announced = [text[match.end() :].split("\n")[0] for match in _ANNOUNCED.finditer(text)]
    if announced and (last := _normalised(announced[-1])):
        return last
    if verifier == "math":
        number = last_number_in(text)
        return None if number is None else _plain_number(number)
    lines = [line for line in text.splitlines() if line.strip()]
    return _normalised(lines[-1]) if lines else None


def _last_boxed(text: str) -> str | None:
    for start in reversed([match.end() for match in re.finditer(r"\\f?boxed\s*\{", text)]):
        depth = 1
        for index in range(start, len(text)):
            depth += (text[index] == "{") - (text[index] == "}")
            if not depth:
                return text[start:index]
    return None


def _normalised(text: str) -> str | None:
    text = unicodedata.normalize("NFKC", text).casefold().replace("\\left", "").replace("\\right", "")
    text = re.sub(r"\\[,;!:]|[$\s]|\*\*", "", text).rstrip(".")
    number = _number(text)
    return _plain_number(number) if number is not None else text or None


def _number(text: str) -> Decimal | None:
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    try:
        return Decimal(text) if _SIMPLE_NUMBER.fullmatch(text) else None
    except InvalidOperation:
        return None


def _plain_number(number: Decimal) -> str:
    """``-0.50`` gives -0.5, ``1E2`` 100."""
    sign, digits, exponent = number.as_tuple()
    if not number or not isinstance(exponent, int):
        return "0"
    if abs(number.adjusted()) > _LONGEST:  # arithmetic would round it, or overflow
        text = "".join(map(str, digits)).rstrip("0")
        return f"{'-' * sign}{text}e{number.adjusted()}"
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _classes(answers: Sequence[str | None]) -> dict[str, str]:
    return {answer: answer for answer in answers if answer is not None}


def _join(classes: dict[str, str], one: str, other: str) -> None:
    into, gone = classes[one], classes[other]
    classes.update({answer: into for answer, of in classes.items() if of == gone})


def _join_what_the_verifier_takes_for_the_same(
    problems: Sequence[Problem],
    groups: Sequence[Sequence[Scored]],
    answers: Sequence[Sequence[str | None]],
    found: Sequence[dict[str, str]],
    pool: Scorer,
    correct_at: float,
) -> None:
    asked: list[tuple[int, str, str]] = []
    for number, (group, value) in enumerate(zip(groups, answers, strict=True)):
        right = {answer for answer, response in zip(value, group, strict=True) if response.correct}
        wrong = [answer for answer in found[number] if answer not in right]
        pairs = combinations(wrong, 2)
        asked += [(number, one, other) for one, other in pairs if _number(one) is None or _number(other) is None]
    if not asked:
        return
    items = [(replace(problems[number], answer=one), f"\\boxed{{{other}}}") for number, one, other in asked]
    results = pool.score(items, list(range(len(items))))
    for (number, one, other), result in zip(asked, results, strict=True):
        if result.error is None and result.reward is not None and result.reward >= correct_at:
            _join(found[number], one, other)


def _tally(group: Sequence[Scored], answers: Sequence[str | None], classes: Mapping[str, str]) -> list[tuple[int, int]]:
    counts: dict[str, list[int]] = {}
    for response, answer in zip(group, answers, strict=True):
        if answer is not None:
            count = counts.setdefault(classes[answer], [0, 0])
            count[0] += 1
            count[1] += response.correct
    return [(count, correct) for count, correct in counts.values()]
