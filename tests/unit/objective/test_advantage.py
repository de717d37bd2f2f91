"""Group advantages and the overlong penalty."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.objective import ObjectiveConfig
from tepo_megatron.objective import build_objective, group_advantages, overlong_penalty
from tests.support.objective_batches import make_batch

REWARDS = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.7, 1.0]), st.integers(-2, 2)), min_size=1, max_size=12)


def _by_hand(rewards, groups, kind, std):
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = math.fsum(peers) / len(peers)
        if max(peers) == min(peers):
            out.append(0.0)
        elif kind == "leave_one_out":
            out.append(reward - (math.fsum(peers) - reward) / (len(peers) - 1))
        elif kind == "no_std":
            out.append(reward - mean)
        else:
            degrees = len(peers) - (std == "sample")
            out.append((reward - mean) / (math.sqrt(math.fsum((r - mean) ** 2 for r in peers) / degrees) + 1e-6))
    return out


@given(REWARDS, st.sampled_from(["group", "no_std", "leave_one_out"]), st.sampled_from(["sample", "population"]))
def test_matches_plain_arithmetic(pairs, kind, std):
    """Groups of any size, anywhere in the batch; equal rewards and groups of one give exactly 0."""
    rewards, groups = zip(*pairs, strict=True)
    result = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), kind=kind, std=std)
    expected = torch.tensor(_by_hand(rewards, groups, kind, std), dtype=torch.float64)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)
    flat = [len({r for r, g in pairs if g == group}) == 1 for group in groups]
    assert all(value == 0 for value, is_flat in zip(result.tolist(), flat, strict=True) if is_flat)


def test_hand_computed():
    """Group 5 has rewards 1, 0, 0 and group 2 has 3, 1: means 1/3 and 2, sample deviations 0.57735 and 1.41421."""
    rewards, groups = torch.tensor([1.0, 3.0, 0.0, 1.0, 0.0]), torch.tensor([5, 2, 5, 2, 5])
    close = lambda result, values: torch.testing.assert_close(result, torch.tensor(values), rtol=1e-5, atol=1e-5)  # noqa: E731
    close(group_advantages(rewards, groups), [1.154699, 0.707106, -0.577349, -0.707106, -0.577349])
    close(group_advantages(rewards, groups, std="population"), [1.414211, 0.999999, -0.707105, -0.999999, -0.707105])
    close(group_advantages(rewards, groups, kind="no_std"), [2 / 3, 1.0, -1 / 3, -1.0, -1 / 3])
    close(group_advantages(rewards, groups, kind="leave_one_out"), [1.0, 2.0, -0.5, -2.0, -0.5])


def test_a_rounded_mean_is_not_a_difference():
    """0.1 added three times and divided by three is not 0.1; divided by eps the rest would be an advantage of 1e-11."""
    assert group_advantages(torch.full((3,), 0.1, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)).tolist() == [0.0] * 3


def test_rewards_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="reward of sequence 1 is nan"):
        group_advantages(torch.tensor([0.0, torch.nan]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"rewards_S has shape \(2,\)"):
        group_advantages(torch.zeros(2), torch.zeros(3, dtype=torch.int64))


def test_overlong_penalty():
    """Up to 6 nothing, between 6 and 10 a quarter per token, from 10 on everything."""
    lengths = torch.tensor([0, 6, 7, 8, 10, 99])
    assert overlong_penalty(lengths, max_tokens=10, buffer_tokens=4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_overlong_penalty_counts_response_tokens_and_comes_before_the_advantage():
    batch, _ = make_batch([[False, True, True], [True, True, True]], rewards=[1.0, 1.0], groups=[0, 0])
    overlong = {"max_tokens": 3, "buffer_tokens": 1, "penalty": 0.5}
    objective = build_objective(ObjectiveConfig(advantage={"kind": "no_std", "overlong": overlong}))
    assert objective.advantages(batch).tolist() == [0.25, -0.25]
