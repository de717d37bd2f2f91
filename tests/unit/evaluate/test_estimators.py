from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.evaluate.estimators import avg_at_k, pass_at_k

verdicts = st.lists(st.booleans(), min_size=1, max_size=9)


@given(verdicts=verdicts, data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(verdicts: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(verdicts)))
    expected = fmean(any(subset) for subset in combinations(verdicts, k))
    assert pass_at_k(len(verdicts), sum(verdicts), k) == pytest.approx(expected, abs=1e-12)


@given(verdicts=verdicts)
def test_edges(verdicts: list[bool]) -> None:
    n, c = len(verdicts), sum(verdicts)
    assert pass_at_k(n, c, 1) == pytest.approx(c / n)
    assert pass_at_k(n, c, n) == float(any(verdicts))
    assert avg_at_k(n, c) == fmean(verdicts)


def test_large_numbers_do_not_overflow() -> None:
    assert pass_at_k(10**5, 1, 10) == pytest.approx(1e-4, rel=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1)])
def test_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="samples"):
        pass_at_k(n, c, k)


def test_avg_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        avg_at_k(0, 0)
