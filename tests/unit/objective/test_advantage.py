"""Group advantages and the overlong penalty."""

import math
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.compose import build_objective
from tests.support.objective_batches import doubles, make_batch, plain_step

REWARDS = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.7, 1.0]), st.integers(-2, 2)), min_size=1, max_size=12)
STDS = st.sampled_from(["sample", "population"])


def _advantages(rewards, groups, lengths=None, *, parts=None, **choice):
    """Of responses of these lengths, by default one token each."""
    lengths = lengths or [1] * len(groups)
    batch, _ = plain_step(lengths, torch.zeros(len(lengths)), *[torch.zeros(sum(lengths))] * 2)
    batch = batch.with_(rewards_S=rewards, groups_S=groups, reward_parts_SK=parts)
    return _objective(tuple(choice.items())).advantages(batch)


@cache
def _objective(choice):
    return build_objective(ObjectiveConfig(advantage={"kind": "group", **dict(choice)}))


def _by_hand(rewards, groups, kind, std="sample"):
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
        elif kind == "divide_by_mean":
            out.append((reward - mean) / mean)
        else:
            degrees = len(peers) - (std == "sample")
            out.append((reward - mean) / (math.sqrt(math.fsum((r - mean) ** 2 for r in peers) / degrees) + 1e-6))
    return out


def _over_deviation(values, counts, std="sample"):
    """``counts``: how often each value is in the batch."""
    square = math.fsum(n * value**2 for n, value in zip(counts, values, strict=True))
    deviation = math.sqrt(square / max(sum(counts) - (std == "sample"), 1)) + 1e-6
    return [value / deviation for value in values]


def _assert_close(result, expected, atol=1e-9):
    torch.testing.assert_close(result, doubles(*expected), rtol=1e-9, atol=atol)


@given(REWARDS, st.sampled_from(["group", "no_std", "leave_one_out", "divide_by_mean"]), STDS)
def test_matches_plain_arithmetic(pairs, kind, std):
    """Groups of any size, anywhere in the batch; equal rewards and groups of one give exactly 0."""
    rewards, groups = zip(*pairs, strict=True)
    options = {"std": std} if kind == "group" and std != "sample" else {}  # which is the default
    result = _advantages(doubles(*rewards), torch.tensor(groups), kind=kind, **options)
    _assert_close(result, _by_hand(rewards, groups, kind, std))
    flat = [len({r for r, g in pairs if g == group}) == 1 for group in groups]
    assert all(value == 0 for value, is_flat in zip(result.tolist(), flat, strict=True) if is_flat)


@given(REWARDS, st.data())
def test_whitened_over_responses_or_tokens(pairs, data):
    rewards, groups = zip(*pairs, strict=True)
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=len(pairs), max_size=len(pairs)))
    centred = _by_hand(rewards, groups, "no_std")
    mean = math.fsum(n * value for n, value in zip(lengths, centred, strict=True)) / sum(lengths)
    for over, expected in (
        ("responses", _over_deviation(centred, [1] * len(pairs))),
        ("tokens", _over_deviation([value - mean for value in centred], lengths)),
    ):
        tensors = doubles(*rewards), torch.tensor(groups)
        _assert_close(_advantages(*tensors, lengths, kind="whitened", over=over), expected)


@given(REWARDS, st.lists(st.floats(0.1, 10), min_size=2, max_size=3), STDS)
def test_gdpo_is_the_weighted_sum_of_rewards_that_are_normalised_one_by_one(pairs, weights, std):
    rewards, groups = zip(*pairs, strict=True)
    columns = [[*rewards[shift:], *rewards[:shift]] for shift in range(len(weights))]
    normalised = [_by_hand(column, groups, "group", std) for column in columns]
    total = [math.fsum(w * value for w, value in zip(weights, row, strict=True)) for row in zip(*normalised, strict=True)]
    parts = doubles(*columns).T
    given = {"kind": "gdpo", "weights": tuple(weights), "std": std, "eps": 1e-6}
    result = _advantages(torch.zeros(len(pairs)), torch.tensor(groups), parts=parts, **given)
    _assert_close(result, _over_deviation(total, [1] * len(pairs), std), atol=1e-7)  # sums that cancel, divided by eps


def test_gdpo_takes_the_rewards_that_the_batch_carries():
    batch, _ = make_batch([[True]] * 4)
    objective = build_objective(ObjectiveConfig(preset="gdpo"))
    single = batch.with_(reward_parts_SK=None)
    for one, parts in ((batch, batch.reward_parts_SK), (single, batch.rewards_S.unsqueeze(1))):
        expected = _advantages(torch.zeros(4), batch.groups_S, parts=parts, kind="gdpo")
        torch.testing.assert_close(objective.advantages(one), expected)


def _refused(weights=(1, 2), **changes):
    objective = build_objective(ObjectiveConfig(preset="gdpo", advantage={"weights": weights}))
    return objective.advantages(make_batch([[True]] * 4)[0].with_(**changes))


PAIR = torch.tensor([0, 0])


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda: _refused(reward_parts_SK=None), r"weights has 2 entries, but the rewards have shape \(4, 1\)"),
        (lambda: _refused(weights=[2.0]), "at least 2 items"),
        (lambda: _advantages(doubles(1.0, -0.5), PAIR, kind="divide_by_mean"), r"1 is -0\.5; .*must not be negative"),
        (lambda: _advantages(doubles(0.0, torch.nan), PAIR), "reward of sequence 1 is nan"),
        (lambda: _advantages(torch.zeros(2), torch.zeros(3, dtype=torch.int64)), r"rewards_S has shape \(2,\)"),
    ],
)
def test_rewards_that_do_not_fit_are_refused(compute, message):
    with pytest.raises(ValueError, match=message):
        compute()


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
