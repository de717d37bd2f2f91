"""Estimators against brute force; intervals by simulation and by hand; which responses give the same answer."""

from collections import Counter
from collections.abc import Hashable, Sequence
from fractions import Fraction
from itertools import combinations
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.evaluate.answers import Notion, Scored, tally_answers
from tepo_megatron.tasks.evaluate.estimators import bootstrap, maj_at_k, pass_at_k
from tepo_megatron.tasks.protocol import RewardResult

verdicts = st.lists(st.booleans(), min_size=1, max_size=9)


@given(verdicts=verdicts, data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(verdicts: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(verdicts)))
    expected = fmean(any(subset) for subset in combinations(verdicts, k))
    assert pass_at_k(len(verdicts), sum(verdicts), k) == pytest.approx(expected, abs=1e-12)


voters = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=8)


def accuracy_of_the_vote(subset: tuple[tuple[str | None, bool], ...]) -> float:
    """One vote counted by hand: the correct share of the most frequent answer; of several, the mean of theirs."""
    votes = Counter(answer for answer, _ in subset if answer is not None)
    if not votes:
        return 0.0
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return fmean(fmean(correct for given, correct in subset if given == answer) for answer in winners)


@given(samples=voters, data=st.data())
def test_maj_at_k_is_the_mean_over_the_votes_of_all_subsets(
    samples: list[tuple[str | None, bool]], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(samples)))
    answers = dict.fromkeys(answer for answer, _ in samples if answer is not None)
    tallies = [[correct for given, correct in samples if given == answer] for answer in answers]
    expected = fmean(accuracy_of_the_vote(subset) for subset in combinations(samples, k))
    found = maj_at_k([(len(tally), sum(tally)) for tally in tallies], len(samples), k)
    assert found == pytest.approx(expected, abs=1e-12)


def test_the_vote_of_all_samples_counts_no_subsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tepo_megatron.tasks.evaluate.estimators._chance_to_win", Mock(side_effect=AssertionError))
    assert maj_at_k([(1 + number % 3, number % 2) for number in range(128)], 255, 255) == pytest.approx(1 / 6)
    assert maj_at_k([], 3, 3) == 0.0


def test_many_samples_do_not_overflow() -> None:
    assert pass_at_k(10**5, 1, 10) == pytest.approx(1e-4, rel=1e-9)
    assert maj_at_k([(1, 1)], 1100, 550) == pytest.approx(0.5)


RUNS = 1500
"""Simulated evaluations; the share of them that an interval holds the true mean in has a standard error of 0.6 %."""


@pytest.mark.parametrize(
    ("problems", "samples", "beta"),
    [(30, 16, (1.0, 2.0)), (100, 1, (2.0, 2.0)), (272, 4, (0.7, 0.7))],
    ids=["30 problems, avg@16", "100 problems, greedy", "272 problems, avg@4"],
)
def test_an_interval_holds_the_true_mean_in_95_percent_of_evaluations(
    problems: int, samples: int, beta: tuple[float, float]
) -> None:
    """Problems of all difficulties, drawn anew each time, each answered several times: 95 % within 2."""
    random = np.random.default_rng(7)
    truth = beta[0] / sum(beta)
    held = 0
    for seed in range(RUNS):
        chances = random.beta(*beta, problems)
        found = bootstrap(random.binomial(samples, chances) / samples, resamples=300, seed=seed)
        held += found.low <= truth <= found.high
    assert held / RUNS == pytest.approx(0.95, abs=0.02)


def test_it_is_close_to_students_interval_where_that_is_right() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 40)
    half = 2.023 * values.std(ddof=1) / 40**0.5
    found = bootstrap(values, resamples=20000)
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.06)
    assert bootstrap(values) == bootstrap(values)


def test_where_all_problems_are_the_same() -> None:
    """No problem of 30 solved: the true share may still be 1 - 0.025^(1/30), about 12 %."""
    none = bootstrap([0.0] * 30, share=True)
    assert (none.mean, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(0.1157, abs=1e-4)
    assert bootstrap([1.0] * 30, share=True).low == pytest.approx(1 - none.high)
    assert bootstrap([5.0] * 3) == bootstrap([5.0] * 3, share=True)
    assert bootstrap([5.0] * 3).high == 5.0
    assert [bootstrap([0.1] * count).excludes_zero for count in (1, 5, 6)] == [False, False, True]
    assert [bootstrap([-0.1, -0.2] * count).excludes_zero for count in (1, 2, 10)] == [False, False, True]


@pytest.mark.parametrize("values", [[], [0.5, float("nan")]])
def test_what_has_no_interval(values: list[float]) -> None:
    with pytest.raises(ValueError, match="an interval needs"):
        bootstrap(values)


def scored(text: str, correct: bool = False) -> Scored:
    return Scored(text, 1, "stop", RewardResult(float(correct)), correct)


def tally(
    responses: list[Scored], verifier: str = "math", notion: Notion = "verifier"
) -> tuple[list[tuple[int, int]], list[tuple[str, str]]]:
    """Counts of an answer's responses, and of the right ones among them, and what the verifier was asked: whether two
    fractions are equal; what is none cannot be scored.
    """
    asked: list[tuple[str, str]] = []

    def score(items: Sequence[tuple[Problem, str]], groups: Sequence[Hashable]) -> list[RewardResult]:
        assert len(set(groups)) == len(items)
        pairs = [(problem.answer, text.removeprefix("\\boxed{").removesuffix("}")) for problem, text in items]
        asked.extend(pairs)
        return [
            RewardResult(None, "no fraction") if "x" in pair else RewardResult(float(Fraction(pair[0]) == Fraction(pair[1])))
            for pair in pairs
        ]

    pool: Any = SimpleNamespace(score=score)
    problems = [Problem("p", "what?", "1/2")]
    settings: Any = {"verifier": verifier, "notion": notion, "pool": pool, "is_correct": lambda result: result.is_correct(1.0)}
    found = tally_answers(problems, [responses], **settings)
    return sorted(found[0]), asked


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
        ("math", r"\boxed{a \boxed{b} {c}} }", "b"),
        ("math", r"} \fbox{1} \fboxed {{2}} \boxed{" + "{", "{2}"),
        pytest.param("math", r"\boxed{7}" + r"\boxed{" * 50_000, "7", id="a degenerate response"),
        pytest.param("math", "The answer is 5.\n" * 20_000, "5", id="another one"),
        ("math", r"<think>\boxed{12}?</think>The answer is 16.", "16"),
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
