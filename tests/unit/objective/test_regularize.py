"""KL estimators, the KL mask, the entropy bonus; what is true of the entropy of a softmax."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.scores import logprob_and_entropy
from tests.support.objective_batches import make_batch, masks, outputs_of, plain_step, whole

LOGITS = st.lists(st.floats(-2, 2), min_size=5, max_size=5).map(lambda row: torch.tensor(row, dtype=torch.float64))


def _penalties(policy, old, reference, **term):
    """The penalty at every token of a vocabulary."""
    batch, scores = plain_step([1] * len(old), torch.zeros(len(old)), policy, old, reference=reference)
    config = {"preset": "kl_cov", "kl_cov": None, "kl": {"coefficient": 1.0, **term}}
    return torch.stack([output.numerator for output in outputs_of(config, batch, scores)])


@given(LOGITS, LOGITS, LOGITS, st.sampled_from(["k1", "k3"]), st.sampled_from(["old", "reference"]))
def test_importance_weighted_kl_is_unbiased_under_samples_of_the_old_policy(new, old, reference, estimator, against):
    """E over a ~ π_old is KL(π_θ‖π_old) or KL(π_θ‖π_ref), in value and in gradient (docs/reference/tepo.md, equation 8)."""
    logits = new.requires_grad_()
    policy, old, reference = logits.log_softmax(-1), old.log_softmax(-1), reference.log_softmax(-1)
    estimate = (old.exp() * _penalties(policy, old, reference, estimator=estimator, against=against, weight="importance")).sum()
    exact = (policy.exp() * (policy - (old if against == "old" else reference))).sum()
    torch.testing.assert_close(estimate, exact, rtol=1e-9, atol=1e-12)
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (estimate, exact)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_estimators_by_hand():
    d = torch.tensor([0.5, -0.5], dtype=torch.float64)
    expected = {"k1": [0.5, -0.5], "k2": [0.125, 0.125], "k3": [0.10653066, 0.14872127], "abs": [0.5, 0.5]}
    for estimator, values in expected.items():
        torch.testing.assert_close(_penalties(d, 0 * d, 0 * d, estimator=estimator), torch.tensor(values, dtype=torch.float64))


def test_k3_of_a_small_step_keeps_its_digits_in_fp32():
    """exp(−d) − 1 + d of d = 1e-3 is 5e-7, of which a plain fp32 exp(−d) − 1 would leave one digit."""
    d = torch.tensor([1e-3])
    assert _penalties(d, 0 * d, 0 * d, estimator="k3").item() == pytest.approx(4.998334e-07, rel=2e-3)


@given(masks(min_sequences=2), st.integers(0, 99), st.floats(0.0, 0.1))
def test_measured_mask(rows, seed, tolerance):
    """Exactly the response tokens with A > 0 and ΔH < −tolerance; the penalty and its gradient are there and nowhere else."""
    batch, scores = make_batch(rows, seed=seed)
    with_mask, without = (
        build_objective(ObjectiveConfig(kl_mask=mask)) for mask in ({"tolerance": tolerance, "coefficient": 3.0}, None)
    )
    advantage = with_mask.advantages(batch)[batch.sequence_index_T]
    chosen = batch.loss_mask_T & (advantage > 0) & (scores.entropy - batch.old_entropy_T < -tolerance)
    loss, (gradient, *_), metrics, _ = whole(with_mask, batch, scores)
    plain_loss, (plain_gradient, *_), *_ = whole(without, batch, scores)
    delta = (scores.logprob - batch.old_logprobs_T).detach()
    tokens = batch.loss_mask_T.sum()
    torch.testing.assert_close(loss - plain_loss, 3.0 * (delta.exp() * delta - delta.exp() + 1)[chosen].sum() / tokens)
    expected = torch.where(chosen, 3.0 * delta * delta.exp(), 0.0) / tokens
    torch.testing.assert_close(gradient - plain_gradient, expected, rtol=1e-9, atol=1e-12)
    assert metrics["mask/fraction"].tolist() == [chosen.sum().item(), tokens.item()]


@given(masks(), st.integers(0, 99), st.floats(0.1, 2.0))
def test_entropy_bonus_fixed_and_adaptive(rows, seed, target):
    """The bonus is coefficient · mean entropy; adaptive, the coefficient falls from 0.2 at H = 0 to 0 at H = target."""
    batch, scores = make_batch(rows, seed=seed)
    plain = whole(build_objective(ObjectiveConfig()), batch, scores)
    mean = scores.entropy[batch.loss_mask_T].mean().detach()
    old_mean = batch.old_entropy_T[batch.loss_mask_T].mean().item()
    for bonus, coefficient in (
        ({"coefficient": 0.2}, 0.2),
        ({"kind": "adaptive", "coefficient": 0.2, "target": target}, 0.2 * min(max((target - old_mean) / target, 0.0), 1.0)),
    ):
        objective = build_objective(ObjectiveConfig(entropy=bonus))
        loss, (_, gradient, _), *_ = whole(objective, batch, scores)
        torch.testing.assert_close(loss, plain[0] - coefficient * mean)
        torch.testing.assert_close(
            gradient, torch.where(batch.loss_mask_T, -coefficient / batch.loss_mask_T.sum().double(), 0.0)
        )
    assert (plain[1][1] == 0).all()


@given(masks(min_sequences=2), st.integers(0, 99), st.sampled_from([0.0, 1e-6, 0.01, 0.05, 0.2]))
def test_the_automatic_tolerance_is_the_noise_and_no_less_than_the_rounding_of_fp32(rows, seed, noise):
    batch, scores = make_batch(rows, seed=seed)
    objective = build_objective(ObjectiveConfig())
    batch = batch.with_(advantages_S=objective.advantages(batch))
    output = objective(scores, batch, objective.prepare(batch, entropy_noise=noise))
    falls = scores.entropy - batch.old_entropy_T < -max(1e-5, noise)
    chosen = batch.loss_mask_T & (batch.advantages_S[batch.sequence_index_T] > 0) & falls
    assert [float(value) for value in output.metrics["mask/fraction"]] == [chosen.sum(), batch.loss_mask_T.sum()]


SOFTMAX_LOGITS = st.lists(st.floats(-4, 4), min_size=2, max_size=8).map(lambda row: torch.tensor(row, dtype=torch.float64))
SIGNS = st.sampled_from([1.0, -1.0])


def entropy(logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(0)
    return -(log_p.exp() * log_p).sum()


def gradient(logits: Tensor) -> Tensor:
    return torch.func.grad(entropy)(logits)


def slope_of(logits: Tensor, action: int) -> float:
    """The package's, which the mask ``first_order`` reads."""
    scores = logprob_and_entropy(logits.unsqueeze(0), torch.tensor([action]), entropy_slope=True)
    return scores.entropy_slope.item()


@given(SOFTMAX_LOGITS)
def test_the_derivative_by_a_logit_has_the_other_sign_than_in_equation_1_of_p2(logits: Tensor) -> None:
    p = logits.softmax(0)
    right = -p * (p.log() + entropy(logits))
    torch.testing.assert_close(gradient(logits), right, rtol=0, atol=1e-12)
    step = 1e-5
    moves = step * torch.eye(len(logits), dtype=torch.float64)
    quotients = torch.stack([(entropy(logits + move) - entropy(logits - move)) / (2 * step) for move in moves])
    torch.testing.assert_close(quotients, right, rtol=0, atol=1e-8)
    assume(right.abs().max() > 1e-6)
    assert (quotients + right).abs().max() > 1e-6  # the derivative is not −right


@given(SOFTMAX_LOGITS)
def test_equation_13_of_p2_is_identically_0_because_it_lost_a_logarithm(logits: Tensor) -> None:
    """−Σ_a p(a) ∇log p(a) is minus the gradient of Σ_a p(a) = 1. With the lost factor it is the gradient of the entropy."""
    p, log_p = logits.softmax(0), logits.log_softmax(0)
    scores = torch.func.jacrev(lambda moved: moved.log_softmax(0))(logits)  # row a: ∇log p(a)
    torch.testing.assert_close(-(p @ scores), torch.zeros_like(p), rtol=0, atol=1e-14)
    torch.testing.assert_close(-((p * log_p) @ scores), gradient(logits), rtol=0, atol=1e-12)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("action", [0, 1])
def test_the_uniform_policy_of_two_actions_contradicts_lemma_3_2_and_theorem_3_1_of_p2(action: int, advantage: float) -> None:
    """The entropy's gradient is 0, and with it its product with every step: no strict sign for any advantage."""
    logits = torch.zeros(2, dtype=torch.float64)
    step = advantage * torch.func.grad(lambda moved: moved.log_softmax(0)[action])(logits)
    assert step.abs().max() == 0.5
    assert gradient(logits).abs().max() == 0
    assert gradient(logits) @ step == slope_of(logits, action) == 0
    assert entropy(logits + 0.1 * step) < entropy(logits)  # it is the maximum: of second order, whatever the advantage


@given(st.floats(0.01, 4))
def test_a_positive_advantage_lowers_the_entropy_for_one_action_and_raises_it_for_the_other(gap: float) -> None:
    logits = torch.tensor([gap, 0.0], dtype=torch.float64)
    assert slope_of(logits, 0) < 0 < slope_of(logits, 1)


@given(SOFTMAX_LOGITS, st.data(), SIGNS)
def test_the_slope_of_the_package_has_the_sign_of_the_change(logits: Tensor, data: st.DataObject, advantage: float) -> None:
    """One gradient step on A · log p_k, against the entropies before and after."""
    action = data.draw(st.integers(0, len(logits) - 1))
    slope = slope_of(logits, action)
    step = advantage * torch.func.grad(lambda moved: moved.log_softmax(0)[action])(logits)
    assert slope * advantage == pytest.approx((gradient(logits) @ step).item(), abs=1e-12)
    assume(abs(slope) > 1e-4)
    change = (entropy(logits + 1e-6 * step) - entropy(logits)).item()
    assert (change < 0) == (advantage * slope < 0)
