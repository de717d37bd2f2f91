"""Which responses give the same answer: by what the verifier compares, by asking it, or by the text."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from fractions import Fraction

import pytest

from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.evaluate.answers import Notion, Scored, tally_answers
from tepo_megatron.tasks.protocol import RewardResult

PROBLEM = Problem("p", "what?", "1/2")


class FractionScorer:
    """1 where two fractions are equal; what is none cannot be scored."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def score(self, items: Sequence[tuple[Problem, str]], groups: Sequence[Hashable]) -> list[RewardResult]:
        assert len(set(groups)) == len(items)
        return [self._one(problem.answer, text.removeprefix("\\boxed{").removesuffix("}")) for problem, text in items]

    def _one(self, answer: str, given: str) -> RewardResult:
        self.asked.append((answer, given))
        try:
            return RewardResult(float(Fraction(answer) == Fraction(given)))
        except ValueError:
            return RewardResult(None, "no fraction")


def scored(text: str, correct: bool = False) -> Scored:
    return Scored(text, 1, "stop", RewardResult(float(correct)), correct)


def tally(
    responses: list[Scored], verifier: str = "math", notion: Notion = "verifier"
) -> tuple[list[tuple[int, int]], list[tuple[str, str]]]:
    pool = FractionScorer()
    found = tally_answers([PROBLEM], [responses], verifier=verifier, notion=notion, pool=pool, correct_at=1.0)
    return sorted(found[0]), pool.asked


def test_the_verifier_is_asked_which_wrong_answers_are_the_same() -> None:
    texts = ["\\boxed{1/2}", "so \\boxed{2/4}", "\\boxed{1/3}", "\\boxed{2/6}", "\\boxed{3/9}", "\\boxed{x}", "no answer"]
    found, asked = tally([scored(text, at < 2) for at, text in enumerate(texts)])
    assert found == [(1, 0), (2, 2), (3, 0)]  # x alone; 1/2 twice, both right; a third three times
    assert ("1/3", "2/6") in asked
    assert not any("1/2" in pair or "2/4" in pair for pair in asked), "right answers are known to be the same"


def test_two_numbers_are_compared_by_their_values_without_asking() -> None:
    found, asked = tally([scored(f"\\boxed{{{number}}}") for number in ("1,000", "1000", "1000.0", "7", " 7. ", "-7")])
    assert (found, asked) == ([(1, 0), (2, 0), (3, 0)], [])


def test_text_is_compared_where_the_verifier_has_no_notion() -> None:
    responses = [scored("The answer is $X$."), scored("answer: x", correct=True), scored("long\nwords\n\n**x**"), scored("")]
    assert tally(responses, "judge", "text") == ([(3, 1)], [])


@pytest.mark.parametrize(
    ("verifier", "text", "answer"),
    [
        ("exact", "  a b ", "a b"),
        ("last_word", "it is 95", "95"),
        ("last_word", "", None),
        ("last_number", "first 1,200 then 3.50", "3.5"),
        ("last_number", "none", None),
        ("math", r"so \boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("math", r"\boxed{7} and \boxed{unclosed", "7"),
        ("math", "The answer is 3.\nSure: 4 checks.", "3"),
        ("math", "first 4, then 5", "5"),
        ("math", "no idea", None),
        ("mine.py:f", "first\nlast line.\n", "lastline"),
        ("mine.py:f", " \n", None),
    ],
)
def test_final_answers(verifier: str, text: str, answer: str | None) -> None:
    same = str(answer or 1) if verifier in ("exact", "last_word", "last_number") else f"\\boxed{{{answer or 1}}}"
    expected = [(2, 0)] if answer else [(1, 0)]
    assert tally([scored(text), scored(same)], verifier, "text")[0] == expected


@pytest.mark.parametrize(
    ("same", "other"),
    [
        (("1e100000000", "10e99999999"), "1e100000001"),
        (("9" * 5000, "9" * 5000 + ".0"), "9" * 4999 + "8"),
        (("0.000", "-0"), "1e-300"),
        (("120", "1.2e2", "120.00"), "12"),
        (("1" * 40, "1" * 40 + ".0"), "1" * 39 + "2"),
    ],
)
def test_equal_numbers_are_the_same_text_however_large(same: tuple[str, ...], other: str) -> None:
    assert tally([scored(number) for number in (*same, other)], "last_number", "text")[0] == [(1, 0), (len(same), 0)]
