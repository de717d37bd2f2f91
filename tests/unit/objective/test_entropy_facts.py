"""What is true of the entropy of a softmax, and where P2's equations 1 and 13 and its lemma fail (docs/reference/tepo.md).

All in float64, on random policies of two to eight actions.
"""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tepo_megatron.core.scores import logprob_and_entropy

LOGITS = st.lists(st.floats(-4, 4), min_size=2, max_size=8).map(lambda row: torch.tensor(row, dtype=torch.float64))
SIGNS = st.sampled_from([1.0, -1.0])


def entropy(logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(0)
    return -(log_p.exp() * log_p).sum()


def gradient(logits: Tensor) -> Tensor:
    return torch.func.grad(entropy)(logits)


def slope_of(logits: Tensor, action: int) -> float:
    """The package's, which the mask ``first_order`` reads."""
    scores = logprob_and_entropy(logits.unsqueeze(0), torch.tensor([action]), entropy_slope=True)
    assert scores.entropy_slope is not None
    return scores.entropy_slope.item()


@given(LOGITS)
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


@given(LOGITS)
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


@given(LOGITS, st.data(), SIGNS)
def test_the_slope_of_the_package_has_the_sign_of_the_change(logits: Tensor, data: st.DataObject, advantage: float) -> None:
    """One gradient step on A · log p_k, against the entropies before and after."""
    action = data.draw(st.integers(0, len(logits) - 1))
    slope = slope_of(logits, action)
    step = advantage * torch.func.grad(lambda moved: moved.log_softmax(0)[action])(logits)
    assert slope * advantage == pytest.approx((gradient(logits) @ step).item(), abs=1e-12)
    assume(abs(slope) > 1e-4)
    change = (entropy(logits + 1e-6 * step) - entropy(logits)).item()
    assert (change < 0) == (advantage * slope < 0)
