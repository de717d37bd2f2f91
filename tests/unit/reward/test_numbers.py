"""Numbers that no trainer can take are refused with a sentence, wherever they come from."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.problem import is_reward
from tepo_megatron.tasks.reward.pool import weigh
from tepo_megatron.tasks.reward.worker import check_value


class Big:
    def __float__(self) -> float:
        raise OverflowError("it has no end")


@pytest.mark.parametrize("value", [1e39, -1e308, 10**400, Big(), math.nan], ids=("1e39", "-1e308", "10**400", "no end", "nan"))
def test_a_number_without_use_is_a_fault_also_of_a_component(value: Any) -> None:
    for returned in (value, {"a": 1.0, "b": value}):
        number, fault = check_value(returned)
        assert number is None
        assert str(fault).startswith("the verifier returned ")


numbers = st.floats() | st.sampled_from([1e308, -1e308, 1e39, 3.5e38, 1e16, -1e15, math.inf, math.nan])
components = st.dictionaries(st.sampled_from("abc"), numbers, min_size=1)


@given(value=numbers | components, weights=st.none() | components)
def test_a_weighted_sum_is_a_reward_or_a_sentence(value: Any, weights: Any) -> None:
    try:
        reward, parts = weigh(value, weights, None)
    except ValueError:
        return
    assert all(map(is_reward, (reward, *parts.values())))
