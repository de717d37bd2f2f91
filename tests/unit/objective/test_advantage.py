"""Group advantages and the overlong penalty."""

import math
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.config.run import RunConfig
from tepo_megatron.core.objective.compose import build_objective
from tests.support.objective_batches import make_batch, plain_step

REWARDS = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.7, 1.0]), st.integers(-2, 2)), min_size=1, max_size=12)


def _advantages(rewards, groups, lengths=None, *, parts=None, **choice):
    """Of responses of these lengths, by default one token each."""
    lengths = [1] * len(groups) if lengths is None else lengths.tolist()
    batch, _ = plain_step(lengths, torch.zeros(len(lengths)), *[torch.zeros(sum(lengths))] * 2)
    batch = batch.with_(rewards_S=rewards, groups_S=groups, reward_parts_SK=parts)
    return _objective(tuple(choice.items())).advantages(batch)


@cache
def _objective(choice):
    return build_objective(ObjectiveConfig(advantage={"kind": "group", **dict(choice)}))


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
    options = {"std": std} if kind == "group" else {}
    result = _advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), kind=kind, **options)
    expected = torch.tensor(_by_hand(rewards, groups, kind, std), dtype=torch.float64)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)
    flat = [len({r for r, g in pairs if g == group}) == 1 for group in groups]
    assert all(value == 0 for value, is_flat in zip(result.tolist(), flat, strict=True) if is_flat)


def test_hand_computed():
    """Group 5 has rewards 1, 0, 0 and group 2 has 3, 1: means 1/3 and 2, sample deviations 0.57735 and 1.41421."""
    rewards, groups = torch.tensor([1.0, 3.0, 0.0, 1.0, 0.0]), torch.tensor([5, 2, 5, 2, 5])
    close = lambda result, values: torch.testing.assert_close(result, torch.tensor(values), rtol=1e-5, atol=1e-5)  # noqa: E731
    close(_advantages(rewards, groups), [1.154699, 0.707106, -0.577349, -0.707106, -0.577349])
    close(_advantages(rewards, groups, std="population"), [1.414211, 0.999999, -0.707105, -0.999999, -0.707105])
    close(_advantages(rewards, groups, kind="no_std"), [2 / 3, 1.0, -1 / 3, -1.0, -1 / 3])
    close(_advantages(rewards, groups, kind="leave_one_out"), [1.0, 2.0, -0.5, -2.0, -0.5])


def test_divided_by_the_mean():
    """Means 1/3 and 2; a group without any success teaches nothing."""
    rewards, groups = torch.tensor([1.0, 3.0, 0.0, 1.0, 0.0, 0.0, 0.0]), torch.tensor([5, 2, 5, 2, 5, 7, 7])
    result = _advantages(rewards, groups, kind="divide_by_mean")
    torch.testing.assert_close(result, torch.tensor([2.0, 0.5, -1.0, -0.5, -1.0, 0.0, 0.0]))
    with pytest.raises(ValueError, match=r"reward of sequence 1 is -0\.5; .*must not be negative"):
        _advantages(torch.tensor([1.0, -0.5]), torch.tensor([0, 0]), kind="divide_by_mean")


@given(st.lists(st.booleans(), min_size=2, max_size=12))
def test_success_divided_by_its_rate_is_the_gradient_of_the_likelihood(successes):
    """MaxRL: K successes of N; the weights are 1/p − 1 of a success and −1 else, whose sum is 0."""
    rate = sum(successes) / len(successes)
    result = _advantages(torch.tensor(successes, dtype=torch.float64), torch.zeros(len(successes)), kind="divide_by_mean")
    expected = [0.0 if rate in (0, 1) else (1 / rate - 1 if success else -1.0) for success in successes]
    assert result.tolist() == pytest.approx(expected)


def test_whitened_over_the_batch():
    """Centred: 2/3, 1, −1/3, −1, −1/3, squares 24/9 over 4; with lengths 1, 2, 1, 1, 3 the mean of 8 tokens is 1/24."""
    rewards, groups = torch.tensor([1.0, 3.0, 0.0, 1.0, 0.0]), torch.tensor([5, 2, 5, 2, 5])
    lengths = torch.tensor([1, 2, 1, 1, 3])
    close = lambda result, values: torch.testing.assert_close(result, torch.tensor(values), rtol=1e-5, atol=1e-5)  # noqa: E731
    deviation = math.sqrt(24 / 9 / 4) + 1e-6
    values = [2 / 3, 1.0, -1 / 3, -1.0, -1 / 3]
    close(_advantages(rewards, groups, lengths, kind="whitened"), [value / deviation for value in values])
    apart = [value - 1 / 24 for value in values]
    deviation = math.sqrt(sum(n * value**2 for n, value in zip(lengths.tolist(), apart, strict=True)) / 7) + 1e-6
    close(_advantages(rewards, groups, lengths, kind="whitened", over="tokens"), [value / deviation for value in apart])


@given(REWARDS, st.integers(1, 9))
def test_whitened_advantages_have_mean_0_and_deviation_1(pairs, length):
    """Over responses, and over tokens where all responses are as long; equal rewards in every group give 0."""
    given_rewards, given_groups = zip(*pairs, strict=True)
    rewards, groups = torch.tensor(given_rewards, dtype=torch.float64), torch.tensor(given_groups)
    lengths = torch.full_like(groups, length)
    for over in ("responses", "tokens"):
        result = _advantages(rewards, groups, lengths, kind="whitened", over=over)
        assert result.sum().item() == pytest.approx(0, abs=1e-9)
        if (_advantages(rewards, groups) == 0).all():
            assert (result == 0).all()
        elif over == "responses":
            assert result.std().item() == pytest.approx(1, rel=1e-4)


def _gdpo(parts, groups, **choice):
    return _advantages(torch.zeros(len(groups)), groups, parts=parts, kind="gdpo", **choice)


def test_gdpo_hand_computed():
    """Two groups of two; the first reward differs in both, the second in the second group only.

    Each is ±1/√2 where it differs: 1 · (±0.7071) + 2 · (±0.7071, in the other direction) in the second group; divided by the
    deviation of (0.7071, −0.7071, −0.7071, 0.7071), √(4 · 0.5 / 3) = 0.8165.
    """
    parts = torch.tensor([[1.0, 0.5], [0.0, 0.5], [3.0, 0.0], [1.0, 9.0]], dtype=torch.float64)
    result = _gdpo(parts, torch.tensor([4, 4, 1, 1]), weights=(1.0, 2.0), eps=1e-12)
    assert result.tolist() == pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254])


@given(REWARDS, st.floats(0.1, 10), st.floats(0.1, 10))
def test_gdpo_knows_no_scale_of_rewards_and_weights(pairs, scale, weight):
    """Each reward is normalised by itself: its scale, its offset and that of the weights do not matter; K = 1 is whitened."""
    given_rewards, given_groups = zip(*pairs, strict=True)
    first, groups = torch.tensor(given_rewards, dtype=torch.float64), torch.tensor(given_groups)
    second = first.flip(0)
    plain = _gdpo(torch.stack([first, second], 1), groups, weights=(1.0, 2.0))
    scaled = _gdpo(torch.stack([scale * first + 1, scale * second], 1), groups, weights=(weight, 2 * weight))
    torch.testing.assert_close(plain, scaled, rtol=1e-3, atol=1e-4)
    alone = _gdpo(first.unsqueeze(1), groups, eps=1e-12)
    assert alone.sum().item() == pytest.approx(0, abs=1e-9)
    if (alone != 0).any():
        assert alone.std().item() == pytest.approx(1, rel=1e-6)


def test_gdpo_takes_the_rewards_that_the_batch_carries():
    batch, _ = make_batch([[True]] * 4)
    objective = build_objective(ObjectiveConfig(preset="gdpo"))
    torch.testing.assert_close(objective.advantages(batch), _gdpo(batch.reward_parts_SK, batch.groups_S))
    single = batch.with_(reward_parts_SK=None)
    torch.testing.assert_close(objective.advantages(single), _gdpo(batch.rewards_S.unsqueeze(1), batch.groups_S))
    weighted = build_objective(ObjectiveConfig(preset="gdpo", advantage={"weights": [1, 2]}))
    with pytest.raises(ValueError, match=r"weights has 2 entries, but the rewards have shape \(4, 1\)"):
        weighted.advantages(single)
    with pytest.raises(ValueError, match="at least 2 items"):
        ObjectiveConfig(preset="gdpo", advantage={"weights": [2.0]})


def test_a_run_has_one_reward():
    with pytest.raises(ValueError, match=r"weights names 2 rewards, but a run has one"):
        RunConfig.model_validate({"objective": {"preset": "gdpo", "advantage": {"weights": [1, 2]}}})


def test_a_rounded_mean_is_not_a_difference():
    """0.1 added three times and divided by three is not 0.1; divided by eps the rest would be an advantage of 1e-11."""
    assert _advantages(torch.full((3,), 0.1, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)).tolist() == [0.0] * 3


def test_rewards_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="reward of sequence 1 is nan"):
        _advantages(torch.tensor([0.0, torch.nan]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"rewards_S has shape \(2,\)"):
        _advantages(torch.zeros(2), torch.zeros(3, dtype=torch.int64))


def test_overlong_penalty():
    """Up to 6 nothing, between 6 and 10 a quarter per token, from 10 on everything. Only response tokens count."""
    lengths = torch.tensor([0, 6, 7, 8, 10, 99])
    overlong: dict[str, float] = {"max_tokens": 10, "buffer_tokens": 4}
    config = ObjectiveConfig(advantage={"kind": "no_std", "overlong": overlong})
    batch, _ = make_batch([[True] * length or [False] for length in lengths.tolist()], rewards=[0.0] * 6, groups=[0] * 6)
    penalties = torch.tensor([0.0, 0.0, -0.25, -0.5, -1.0, -1.0])
    torch.testing.assert_close(build_objective(config).advantages(batch), penalties - penalties.mean())
    batch, _ = make_batch([[False, True, True], [True, True, True]], rewards=[1.0, 1.0], groups=[0, 0])
    overlong = {"max_tokens": 3, "buffer_tokens": 1, "penalty": 0.5}
    objective = build_objective(ObjectiveConfig(advantage={"kind": "no_std", "overlong": overlong}))
    assert objective.advantages(batch).tolist() == [0.25, -0.25]
