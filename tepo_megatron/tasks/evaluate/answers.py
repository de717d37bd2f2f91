import re
import unicodedata
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import combinations
from typing import Any, Literal, Protocol

from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.verifiers import last_number_in


class Scorer(Protocol):
    def score(self, items: Sequence[tuple[Problem, str]], groups: Sequence[Hashable]) -> list[RewardResult]: ...


@dataclass(frozen=True)
class Scored:
    """``num_tokens`` includes the end token. A failed response is wrong, whatever ``failed_reward`` is."""

    text: str
    num_tokens: int
    finish_reason: str
    result: RewardResult
    correct: bool
    turns: Sequence[Mapping[str, str]] = ()
    model_tokens: int = 0

    def row(self) -> dict[str, Any]:
        return {
            "response": self.text,
            **({"turns": self.turns, "model_tokens": self.model_tokens} if self.turns else {}),
            "reward": self.result.reward,
            "correct": self.correct,
            "tokens": self.num_tokens,
            "finish_reason": self.finish_reason,
            **({"components": dict(self.result.parts)} if self.result.parts else {}),
            **({"error": self.result.error} if self.result.error else {}),
        }


Notion = Literal["verifier", "text"]
Tally = list[tuple[int, int]]  # of a problem: (responses, correct ones) of each distinct answer

_ANNOUNCED = re.compile(r"(?:answer|result|solution)\s*(?:is|:|=)\s*:?\s*", re.I)
_LONGEST = 100
_SIMPLE_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def tally_answers(
    problems: Sequence[Problem],
    groups: Sequence[Sequence[Scored]],
    *,
    verifier: str,
    notion: Notion,
    pool: Scorer,
    is_correct: Callable[[RewardResult], bool],
) -> list[Tally]:
    """Leaves out responses without a final answer; numbers compare by value. If the verifier compares, correct answers are
    equal, and two others are if one is correct when the other is expected.
    """
    answered = [
        [(answer, response.correct) for response in group if (answer := _final_answer(response.text, verifier)) is not None]
        for group in groups
    ]
    classes = [{answer: answer for answer, _ in pairs} for pairs in answered]
    if notion == "verifier":
        right = [[answer for answer, correct in pairs if correct] for pairs in answered]
        equal = [(number, texts[0], other) for number, texts in enumerate(right) for other in texts[1:]]
        if verifier not in ("exact", "last_word", "last_number"):  # their final answer is the whole comparison
            wrong = [[answer for answer in of if answer not in texts] for of, texts in zip(classes, right, strict=True)]
            equal += _equal_for_the_verifier(problems, wrong, pool, is_correct)
        for number, one, other in equal:
            of, into, gone = classes[number], classes[number][one], classes[number][other]
            of.update({answer: into for answer, current in of.items() if current == gone})
    return [_tally(*counts) for counts in zip(answered, classes, strict=True)]


def _equal_for_the_verifier(
    problems: Sequence[Problem], answers: Sequence[Sequence[str]], pool: Scorer, is_correct: Callable[[RewardResult], bool]
) -> Iterator[tuple[int, str, str]]:
    """Yields (problem's index, answer, equal answer), except for two numbers."""
    pairs = [
        (number, one, other)
        for number, texts in enumerate(answers)
        for one, other in combinations(texts, 2)
        if _number(one) is None or _number(other) is None
    ]
    if pairs:
        items = [(replace(problems[number], answer=one), f"\\boxed{{{other}}}") for number, one, other in pairs]
        results = pool.score(items, list(range(len(items))))
        yield from (pair for pair, result in zip(pairs, results, strict=True) if is_correct(result))


def _tally(answered: Sequence[tuple[str, bool]], classes: Mapping[str, str]) -> Tally:
    counts: dict[str, tuple[int, int]] = {}
    for answer, is_correct in answered:
        total, correct = counts.get(classes[answer], (0, 0))
        counts[classes[answer]] = total + 1, correct + is_correct
    return list(counts.values())


def _final_answer(text: str, verifier: str) -> str | None:
    r"""What exact, last_word and last_number compare; else the last ``\boxed{…}``, the line after the last "answer is", the
    last number (math) or line.
    """
    if verifier == "exact":
        return text.strip() or None
    if verifier == "last_word":
        return text.split()[-1] if text.strip() else None
    if verifier != "last_number":
        text = text.rpartition("</think>")[2].strip() or text
        boxed = _last_boxed(text)
        if boxed is not None:
            return _normalised(boxed)
        *_, announced = (None, *_ANNOUNCED.finditer(text))
        if announced and (last := _normalised(text[announced.end() :].partition("\n")[0])):
            return last
    if verifier in ("last_number", "math"):
        number = last_number_in(text)
        return None if number is None else _plain_number(number)
    lines = [line for line in text.splitlines() if line.strip()]
    return _normalised(lines[-1]) if lines else None


def _last_boxed(text: str) -> str | None:
    opened: list[int] = []  # where boxes begin; 0: another brace
    last, result = 0, None
    for match in re.finditer(r"\\f?boxed\s*\{|[{}]", text):
        if match[0] != "}":
            opened.append(match.end() if len(match[0]) > 1 else 0)
        elif opened and (start := opened.pop()) > last:
            last, result = start, text[start : match.start()]
    return result


def _normalised(text: str) -> str | None:
    text = unicodedata.normalize("NFKC", text).casefold().replace("\\left", "").replace("\\right", "")
    text = re.sub(r"\\[,;!:]|[$\s]|\*\*", "", text).rstrip(".")
    number = _number(text)
    return _plain_number(number) if number is not None else text or None


def _number(text: str) -> Decimal | None:
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return Decimal(text) if _SIMPLE_NUMBER.fullmatch(text) else None


def _plain_number(number: Decimal) -> str:
    sign, digits, exponent = number.as_tuple()
    if not number or not isinstance(exponent, int):
        return "0"
    if abs(number.adjusted()) > _LONGEST:  # arithmetic would round it, or overflow
        text = "".join(map(str, digits)).rstrip("0")
        return f"{'-' * sign}{text}e{number.adjusted()}"
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
