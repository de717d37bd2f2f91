"""Estimators against brute force; intervals hold what they say: coverage by simulation, widths by hand."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.tasks.evaluate.estimators import bootstrap, maj_at_k, pass_at_k

verdicts = st.lists(st.booleans(), min_size=1, max_size=9)


@given(verdicts=verdicts, data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(verdicts: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(verdicts)))
    expected = fmean(any(subset) for subset in combinations(verdicts, k))
    assert pass_at_k(len(verdicts), sum(verdicts), k) == pytest.approx(expected, abs=1e-12)


# -- the most frequent answer

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


@pytest.mark.parametrize("values", [[], [0.5, float("nan")]])
def test_what_has_no_interval(values: list[float]) -> None:
    with pytest.raises(ValueError, match="an interval needs"):
        bootstrap(values)
