"""The trust regions and ratios of the objectives that TEPO is compared with, value by value."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.objective.choices import Divergence
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective import build_objective
from tepo_megatron.core.objective.ratio import log_power_mean
from tepo_megatron.core.objective.trust_region import binary_kl, clip_by_length, clip_logs, soft_gated, within_divergence
from tests.support.objective_batches import make_batch, masks, whole

EXTREME = st.floats(-20, 20)


def _doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def _gradient(value, of):
    return torch.autograd.grad(value.sum(), of)[0].tolist()


def test_logs_are_clipped_on_the_side_that_the_advantage_favours():
    delta = _doubles(0.5, -0.5, 0.5, -0.5, 0.5).requires_grad_()
    bounded = clip_logs(delta, _doubles(1, 1, -1, -1, 0), low=0.3, high=0.4)
    assert bounded.log_T.tolist() == [0.4, -0.5, 0.5, -0.3, 0.5]
    assert _gradient(bounded.log_T, delta) == [0, 1, 1, 0, 1]
    assert bounded.high_T.tolist() == [True, False, False, False, False]
    assert bounded.low_T.tolist() == [False, False, False, True, False]


def test_gmpo_is_the_mean_of_clipped_logs():
    """Ratios e^0.5 and e^0.1 with A = 1: the first counts as e^0.4 and has no gradient, the second half of exp(0.25)."""
    batch, scores = make_batch([[True, True]], spread=0.0)
    batch = batch.with_(advantages_S=torch.ones(1))
    logprob = (batch.old_logprobs_T + _doubles(0.5, 0.1)).requires_grad_()
    objective = build_objective(ObjectiveConfig(preset="gmpo"))
    output = objective(type(scores)(logprob, scores.entropy), batch, objective.prepare(batch))
    assert output.numerator.item() == pytest.approx(-math.exp(0.25))
    assert _gradient(output.numerator, logprob) == pytest.approx([0.0, -math.exp(0.25) / 2])


def test_the_band_of_a_sequence_grows_with_the_root_of_its_length():
    log_ratio = _doubles(-1.0, 0.05, 0.2, 0.07).requires_grad_()
    bounded = clip_by_length(log_ratio, _doubles(4, 4, 9, 9), width=0.03)
    assert bounded.log_T.tolist() == pytest.approx([-0.06, 0.05, 0.09, 0.07])
    assert _gradient(bounded.log_T, log_ratio) == [0, 1, 0, 1]
    assert (bounded.low_T.tolist(), bounded.high_T.tolist()) == ([True, False, False, False], [False, False, True, False])


def test_the_soft_gate():
    """At a ratio of 1 the value is 2 A/τ and the gradient A; at r = 2, τ = 1: 4 σ(1) and 4 σ(1) (1 − σ(1))."""
    ratio = _doubles(1.0, 2.0, 1.0, 0.0).requires_grad_()
    gain = soft_gated(ratio, _doubles(1, 1, -1, -1), 1.0, 2.0)
    assert gain.value_T.tolist() == pytest.approx([2.0, 2.9242343, -1.0, -2 * 0.1192029])
    assert _gradient(gain.value_T, ratio) == pytest.approx([1.0, 0.7864477, -1.0, -4 * 0.1049936])
    assert not (gain.clipped_low_T | gain.clipped_high_T).any()


@given(st.floats(-20, 20), st.floats(0.1, 4), st.sampled_from([-2.0, 0.0, 1.5]))
def test_the_soft_gate_is_steepest_at_a_ratio_of_one(delta, tau, advantage):
    ratio = _doubles(math.exp(delta), 1.0).requires_grad_()
    steep, at_one = _gradient(soft_gated(ratio, _doubles(advantage, advantage), tau, tau).value_T, ratio)
    assert at_one == pytest.approx(advantage)
    assert abs(steep) <= abs(advantage) * (1 + 1e-12)
    assert steep * advantage >= 0


def test_a_token_counts_until_its_probability_has_moved_too_far():
    """p_old = 0.5: p = 0.75 and 0.25 are beyond 0.2, and count only where A pulls them back."""
    old, new = _doubles(*[0.5] * 6).log(), _doubles(0.75, 0.25, 0.75, 0.25, 0.6, 0.75).log().requires_grad_()
    advantage = _doubles(1, 1, -1, -1, 1, 0)
    gain = within_divergence(Divergence(measure="tv", threshold=0.2, cap=1.3), (new - old).exp(), new, old, advantage)
    assert _gradient(gain.value_T, new) == pytest.approx([0, 0.5, -1.3, 0, 1.2, 0])
    assert gain.clipped_high_T.tolist() == [True] + [False] * 5
    assert gain.clipped_low_T.tolist() == [False] * 3 + [True, False, False]
    # binary KL of 0.5 from 0.75: 0.5 ln(0.5/0.75) + 0.5 ln(0.5/0.25) = 0.1438410; from 0.6: 0.0204110
    kl = [0.1438410, 0.1438410, 0.1438410, 0.1438410, 0.0204110, 0.1438410]
    assert binary_kl(old, new).tolist() == pytest.approx(kl, abs=1e-7)
    gain = within_divergence(Divergence(measure="kl", threshold=0.02), (new - old).exp(), new, old, advantage)
    assert _gradient(gain.value_T, new) == pytest.approx([0, 0.5, -1.5, 0, 0, 0])


@given(st.floats(-30, 0), st.floats(-30, 0), st.sampled_from([torch.float32, torch.float64]))
def test_the_binary_kl_is_finite_and_never_negative(first, second, dtype):
    value = binary_kl(torch.tensor([first, first], dtype=dtype), torch.tensor([second, first], dtype=dtype))
    assert value.isfinite().all()
    assert value[0] >= -1e-6
    assert value[1] == 0


def _power_mean(p, delta, mask):
    delta = delta.clone().requires_grad_()
    index, inside = torch.zeros(len(delta), dtype=torch.int64), torch.where(mask, delta, 0.0)
    log = log_power_mean(p, inside, mask, mask.sum(0, keepdim=True).to(delta.dtype), index)
    return log, torch.autograd.grad(log[0], delta)[0]


@given(st.lists(EXTREME, min_size=1, max_size=9), st.floats(-10, 10), st.sampled_from([torch.float32, torch.float64]))
def test_the_power_mean_is_that_of_plain_arithmetic(deltas, p, dtype):
    """Its gradient is the share of each token in the sum of powers. The last value is outside the mask, and not read."""
    delta = torch.tensor([*deltas, 1e6], dtype=dtype)
    log, gradient = _power_mean(p, delta, torch.tensor([True] * len(deltas) + [False]))
    exact = delta[:-1].double()
    if abs(p) < 1e-3:  # where the textbook's formula has no digits left, the next term of the series at p = 0
        expected = exact.mean() + p / 2 * exact.var(correction=0)
    else:
        expected = (torch.logsumexp(p * exact, 0) - math.log(len(exact))) / p
    loose = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-7, "atol": 1e-2 * min(abs(p), 1e-3) + 1e-9}
    torch.testing.assert_close(log[0].double(), expected, **loose)
    shares = torch.softmax(p * exact, 0)
    torch.testing.assert_close(gradient[:-1].double(), shares, rtol=1e-4, atol=1e-6)
    assert gradient[-1] == 0


@given(masks(), st.integers(0, 99))
def test_a_power_of_zero_is_gspo(rows, seed):
    batch, scores = make_batch(rows, seed=seed)
    presets = {"holder_po": {"p": 0.0}, "gspo": {}}
    holder, gspo = (
        whole(build_objective(ObjectiveConfig(preset=name, ratio=ratio)), batch, scores) for name, ratio in presets.items()
    )
    torch.testing.assert_close(holder[0], gspo[0])
    torch.testing.assert_close(holder[1], gspo[1])


@given(masks(), st.integers(0, 99), st.sampled_from([1e-4, 2e-3, 0.3]))
def test_tepo_without_its_mask_is_luspo_with_another_denominator(rows, seed, spread):
    """With one range: Σ_i T_i · TEPO = S · LUSPO, in value and gradient."""
    batch, scores = make_batch(rows, seed=seed, spread=spread)
    region = {"low": 2e-3, "high": 2.5e-3}
    tepo = whole(build_objective(ObjectiveConfig(preset="tepo", kl_mask=None, trust_region=region)), batch, scores)
    luspo = whole(build_objective(ObjectiveConfig(preset="luspo")), batch, scores)
    sequences = sum(any(row) for row in rows)
    torch.testing.assert_close(tepo[0] * batch.loss_mask_T.sum(), luspo[0] * sequences, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(tepo[1][0] * batch.loss_mask_T.sum(), luspo[1][0] * sequences, rtol=1e-9, atol=1e-12)


def test_a_band_for_sums_is_refused_for_means():
    for ratio in ({"kind": "token"}, {"kind": "sequence"}, {"kind": "power_mean", "p": 1.0}):
        with pytest.raises(ValueError, match=r"'length_clip' with objective.ratio.kind.*length_normalized = false"):
            ObjectiveConfig(trust_region={"kind": "length_clip"}, ratio=ratio)
