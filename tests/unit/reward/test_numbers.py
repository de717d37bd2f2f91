"""Numbers that no trainer can take: they fail one response, with its problem's id, and nothing else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.config.rollout import OverlongConfig
from tepo_megatron.core.problem import Problem, is_reward
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.sampler.rollout_file import check_rollouts
from tepo_megatron.tasks.environments.episodes import add_rewards
from tepo_megatron.tasks.reward.pool import RewardPool, weigh
from tepo_megatron.tasks.reward.worker import check_value

VERIFIER = """
from tepo_megatron import Problem


class Big:
    def __float__(self):
        raise OverflowError("it has no end")


VALUES = {"one": 1.0, "wide": 1e39, "huge": -1e308, "integer": 10**400, "no end": Big(), "nan": float("nan")}


def number(problem: Problem, response: str) -> float:
    return VALUES[response]


def parts(problem: Problem, response: str) -> dict[str, float]:
    return {"a": VALUES[response], "b": VALUES[response]}


class Groups:
    def score_group(self, problem: Problem, responses: list[str]) -> list[float]:
        return [VALUES[response] for response in responses]
"""
HOSTILE = ["wide", "huge", "integer", "no end", "nan"]


@pytest.mark.parametrize("form", ["number", "parts", "Groups"])
def test_a_number_without_use_fails_its_response_alone(form: str, tmp_path: Path) -> None:
    (tmp_path / "verifier.py").write_text(VERIFIER)
    responses = ["one", *HOSTILE, "one"]
    with RewardPool(RewardConfig(verifier=f"{tmp_path / 'verifier.py'}:{form}")) as pool:
        groups = [0] * len(responses) if form == "Groups" else None
        results = pool.score([(Problem(f"p/{response}", "", ""), response) for response in responses], groups)
        expected = 2.0 if form == "parts" else 1.0
        assert [result.reward for result in results] == [expected, *[None] * len(HOSTILE), expected]
        for response, result in zip(HOSTILE, results[1:-1], strict=True):
            name = "p/one" if form == "Groups" else f"p/{response}"
            assert str(result.error).startswith(f"problem {name!r}: the verifier returned ")


numbers = st.floats() | st.sampled_from([1e308, -1e308, 1e39, 3.5e38, 1e16, -1e15, math.inf, math.nan])
components = st.dictionaries(st.sampled_from("abc"), numbers, min_size=1)


@given(value=numbers | components, weights=st.none() | components)
def test_a_weighted_sum_is_a_reward_or_a_sentence(value: Any, weights: Any) -> None:
    try:
        reward, parts = weigh(value, weights, None)
    except ValueError:
        return
    assert all(map(is_reward, (reward, *parts.values())))


@given(turns=st.lists(numbers, min_size=1) | st.lists(components, min_size=1))
def test_a_sum_over_turns_is_a_reward_or_a_sentence(turns: Any) -> None:
    """Each turn alone is one."""
    total: Any = 0.0
    for turn in turns:
        value, why = check_value(turn, what="environment")
        if why is None:
            total = add_rewards(total, value)
    try:
        reward, _ = weigh(total, None, None)
    except ValueError:
        return
    assert is_reward(reward)


@given(reward=numbers)
@settings(max_examples=50)
def test_a_record_holds_what_a_verifier_may_return(reward: float) -> None:
    """float32 holds it, and sums of squares of a million like it."""
    rollout = Rollout("p", 0, (1,), (2,), (-0.5,), "stop", WeightsVersion(0), "", reward)
    if is_reward(reward):
        check_rollouts(Path("record"), [rollout], step=0, prompts=1, samples=1)
        assert np.isfinite(1e6 * np.square(np.float32(reward)))
        return
    with pytest.raises(ValueError, match="record, line 2: the reward is "):
        check_rollouts(Path("record"), [rollout], step=0, prompts=1, samples=1)


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_a_configured_reward_is_one_that_a_verifier_may_return(value: float) -> None:
    for make in (lambda: RewardConfig(failed_reward=value), lambda: OverlongConfig(buffer=1, penalty=abs(value) or 1.0)):
        if is_reward(value):
            make()
        else:
            with pytest.raises(ValueError, match="1000000000000000"):
                make()
