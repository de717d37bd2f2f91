from collections import Counter
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.tasks.evaluate.estimators import maj_at_k, pass_at_k

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
