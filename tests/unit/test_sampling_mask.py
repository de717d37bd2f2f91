"""A sampling mask is a list of lists, however it is cut, joined and sent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.rollout import NO_TOKEN, SamplingMask

Others = list[list[int]]
others = st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), max_size=6)


def mask_of(given: Others) -> SamplingMask:
    return SamplingMask([len(each) for each in given], [token for each in given for token in each])


def lists_of(mask: SamplingMask) -> Others:
    return [[int(token) for token in row if token != NO_TOKEN] for row in mask.padded()]


@given(others)
def test_padded_rows_are_the_tokens(given: Others) -> None:
    mask = mask_of(given)
    assert lists_of(mask) == given
    assert mask.padded().shape == (len(given), max(map(len, given), default=0))
    assert len(mask) == len(given)


@given(others.filter(bool), st.data())
def test_places_may_repeat_and_come_in_any_order(given: Others, data: st.DataObject) -> None:
    at = data.draw(st.lists(st.sampled_from(range(len(given)))))
    assert lists_of(mask_of(given)[np.array(at, np.int64)]) == [given[each] for each in at]


@given(st.lists(others))
def test_joined_is_one_behind_the_other(parts: list[Others]) -> None:
    whole = [each for part in parts for each in part]
    joined = SamplingMask.joined(map(mask_of, parts))
    assert joined == mask_of(whole)
    assert hash(joined) == hash(mask_of(whole))
    assert joined != mask_of([*whole, [1]])


@pytest.mark.parametrize(("counts", "ids"), [([2], [1]), ([-1, 1], []), ([1, 1], [1, 2, 3]), ([[1]], [1])])
def test_counts_and_ids_that_do_not_fit_are_refused(counts: list[int], ids: list[int]) -> None:
    with pytest.raises(ValueError, match="a sampling mask of"):
        SamplingMask(counts, ids)
