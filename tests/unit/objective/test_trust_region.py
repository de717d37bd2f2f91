"""Trust regions and mismatch weights, value by value."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.objective.terms import MaskOutside, Truncate
from tepo_megatron.core.objective.mechanisms import lottery_threshold, tickets
from tepo_megatron.core.objective.ratio import effective_sample_share, mismatch_weights
from tepo_megatron.core.objective.trust_region import clipped, weighted_logprob
from tepo_megatron.core.objective.values import covariance_statistic, exact_mean

RATIOS = torch.tensor([0.5, 0.9, 1.1, 1.5, 4.0, 0.5, 0.9, 1.1, 1.5, 4.0], dtype=torch.float64)
SIGNS = torch.tensor([1.0] * 5 + [-1.0] * 5, dtype=torch.float64)


def _gradient(value, ratio):
    return torch.autograd.grad(value.sum(), ratio)[0].tolist()


def test_clip():
    ratio = RATIOS.clone().requires_grad_()
    result = clipped(ratio, SIGNS, 0.8, 1.3)
    assert result.value_T.tolist() == pytest.approx([0.5, 0.9, 1.1, 1.3, 1.3, -0.8, -0.9, -1.1, -1.5, -4.0])
    assert _gradient(result.value_T, ratio) == [1, 1, 1, 0, 0, 0, -1, -1, -1, -1]
    assert result.clipped_high_T.tolist() == [False, False, False, True, True] + [False] * 5
    assert result.clipped_low_T.tolist() == [False] * 5 + [True] + [False] * 4


def test_dual_clip():
    """A < 0 and r = 4: bounded by 3 A, without gradient, and counted as clipped above."""
    ratio = RATIOS.clone().requires_grad_()
    result = clipped(ratio, SIGNS, 0.8, 1.3, dual=3.0)
    assert result.value_T.tolist() == pytest.approx([0.5, 0.9, 1.1, 1.3, 1.3, -0.8, -0.9, -1.1, -1.5, -3.0])
    assert _gradient(result.value_T, ratio) == [1, 1, 1, 0, 0, 0, -1, -1, -1, 0]
    assert result.clipped_high_T.tolist() == [False, False, False, True, True] + [False] * 4 + [True]


def test_clipped_weight_keeps_every_token():
    logprob = torch.full((10,), -2.0, dtype=torch.float64, requires_grad=True)
    result = weighted_logprob(RATIOS, logprob, SIGNS, low=0.2, high=1.0)
    weights = [0.8, 0.9, 1.1, 1.5, 2.0]
    assert _gradient(result.value_T, logprob) == pytest.approx(weights + [-weight for weight in weights])
    assert result.clipped_low_T.tolist() == [True, False, False, False, False] * 2
    assert result.clipped_high_T.tolist() == [False, False, False, False, True] * 2
    assert weighted_logprob(RATIOS, logprob, SIGNS, low=None, high=1.0).value_T[0].item() == pytest.approx(0.5 * -2.0)


def test_mismatch_weights():
    """π_old/π_sampler of 0.4, 2 in one sequence (product 0.8) and 6 in another."""
    difference, index = torch.tensor([0.4, 2.0, 6.0], dtype=torch.float64).log(), torch.tensor([0, 0, 1])
    lengths = torch.tensor([2.0, 1.0], dtype=torch.float64)
    weights = lambda correction: mismatch_weights(correction, difference, index, lengths).tolist()  # noqa: E731
    assert weights(Truncate(cap=1.5)) == pytest.approx([0.4, 1.5, 1.5])
    assert weights(Truncate(level="sequence", cap=3.0)) == pytest.approx([0.8, 0.8, 3.0])
    assert weights(MaskOutside(low=0.5, high=5.0)) == pytest.approx([0.0, 2.0, 0.0])
    assert weights(MaskOutside(level="sequence", low=0.5, high=5.0)) == pytest.approx([0.8, 0.8, 0.0])
    assert weights(Truncate(level="geometric", cap=3.0)) == pytest.approx([0.8**0.5, 0.8**0.5, 3.0])
    assert weights(MaskOutside(level="geometric", low=0.9, high=7.0)) == pytest.approx([0.0, 0.0, 6.0])


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=20), st.floats(-500, 500))
def test_effective_sample_share(logs, shift):
    """Kish's (Σw)²/(N Σw²), whatever the scale of the weights."""
    weights = torch.tensor(logs, dtype=torch.float64).exp()
    expected = weights.sum() ** 2 / (len(logs) * (weights**2).sum())
    torch.testing.assert_close(effective_sample_share(weights.log() + shift), expected, rtol=1e-6, atol=0)


def test_the_lottery_is_fair():
    """Tickets of many similar tokens are spread evenly: drawing a tenth takes about a tenth of either half of any field."""
    generator = torch.Generator().manual_seed(0)
    logprob = -torch.rand(20_000, generator=generator)
    advantage, labels = torch.tensor([1.0, -1.0]).repeat(10_000), torch.arange(20_000) % 50
    drawn = tickets(logprob, advantage, labels)
    assert (drawn >= 0).all()
    assert (drawn < 2**32).all()
    assert drawn.unique().numel() > 19_990
    wins = drawn <= lottery_threshold(torch.ones(20_000, dtype=torch.bool), drawn, 0.1)
    assert wins.sum() == 2000
    for half in (advantage > 0, labels < 25, logprob < -0.5, torch.arange(20_000) < 10_000):
        assert 0.08 < wins[half].double().mean() < 0.12


def test_mismatch_weights_are_detached():
    difference = torch.zeros(3, requires_grad=True)
    assert not mismatch_weights(Truncate(), difference, torch.zeros(3, dtype=torch.int64), torch.tensor([3.0])).requires_grad


@given(st.integers(1, 3000), st.floats(-2, 2, width=32))
def test_the_mean_of_equal_values_is_that_value(count, value):
    """Otherwise a rounding would pass for a covariance where all advantages are equal."""
    assert exact_mean(torch.full((count,), value)).item() == value


VECTOR = st.lists(st.floats(-2, 2), min_size=6, max_size=6).map(lambda row: torch.tensor(row, dtype=torch.float64))


def _covariance(logits, advantage):
    """Cov over a ~ π of log π(a) and A(a)."""
    logprob = logits.log_softmax(-1)
    policy = logprob.exp()
    return (policy * (logprob - (policy * logprob).sum()) * (advantage - (policy * advantage).sum())).sum()


@given(VECTOR, VECTOR)
def test_the_token_statistic_has_the_covariance_as_its_mean(logits, advantage):
    """c(a), averaged over a ~ π with means over π, is Cov(log π, A): falling entropy is where it is positive."""
    logprob = logits.log_softmax(-1)
    policy = logprob.exp()
    statistic = covariance_statistic(logprob, advantage, (policy * logprob).sum(), (policy * advantage).sum())
    torch.testing.assert_close((policy * statistic).sum(), _covariance(logits, advantage), rtol=1e-9, atol=1e-12)
