"""Decoupled PPO: who drew the tokens, what the update stays near to, and what is trained are three policies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.compose import build_objective
from tests.support.objective_batches import plain_step

LOGITS = st.lists(st.floats(-0.7, 0.7), min_size=4, max_size=4)
ADVANTAGES = torch.tensor([1.0, -0.5, 0.25, -1.0])


def _gradients(config, behaviour, proximal, current):
    """The gradient of the surrogate at one token for each of four actions, by log π of that action; log-probs [4]."""
    logprob = current.clone().requires_grad_()
    batch, scores = plain_step([1] * 4, ADVANTAGES, logprob, proximal, sampler=behaviour)
    objective = build_objective(ObjectiveConfig(**config))
    output = objective(scores, batch, objective.prepare(batch))
    return -torch.autograd.grad(output.numerator, logprob)[0], output.metrics


def _policy(logits):
    return torch.log_softmax(torch.tensor(logits, dtype=torch.float64), 0)


@given(LOGITS, LOGITS, LOGITS)
def test_stale_samples_give_what_fresh_ones_would(behaviour, proximal, current):
    """The mean over actions of the behaviour policy is that of PPO over actions of the proximal policy, clip and all."""
    behaviour, proximal, current = (_policy(logits) for logits in (behaviour, proximal, current))
    decoupled, _ = _gradients({"preset": "decoupled_ppo", "mismatch": {"high": 20.0}}, behaviour, proximal, current)
    fresh, _ = _gradients({"preset": "decoupled_ppo", "mismatch": None}, proximal, proximal, current)
    torch.testing.assert_close(behaviour.exp() * decoupled, proximal.exp() * fresh)


@given(LOGITS, LOGITS)
def test_the_first_update_follows_the_policy_gradient(behaviour, current):
    """π_old = π_θ: the mean over stale actions is E[A ∇ log π] over actions of π_θ."""
    behaviour, current = _policy(behaviour), _policy(current)
    decoupled, _ = _gradients({"preset": "decoupled_ppo", "mismatch": {"high": 20.0}}, behaviour, current, current)
    torch.testing.assert_close(behaviour.exp() * decoupled, current.exp() * ADVANTAGES.double())


def test_the_clip_is_around_the_proximal_policy_and_the_bound_is_on_the_stale_ratio():
    """w = 0.5, 3, 2, 6, the last of which is dropped; r = 1.1, 1.3, 0.7, 1.0, of which a narrower clip holds the first."""
    proximal = torch.full((4,), -2.0, dtype=torch.float64)
    behaviour = proximal - torch.tensor([0.5, 3.0, 2.0, 6.0], dtype=torch.float64).log()
    current = proximal + torch.tensor([1.1, 1.3, 0.7, 1.0], dtype=torch.float64).log()
    gradient, metrics = _gradients({"preset": "decoupled_ppo"}, behaviour, proximal, current)
    assert gradient.tolist() == pytest.approx([0.5 * 1.1, -3 * 1.3 * 0.5, 2 * 0.7 * 0.25, 0.0])
    assert metrics["mismatch/dropped"][0].item() == 1
    clipped = {"preset": "decoupled_ppo", "trust_region": {"high": 0.05}}
    assert _gradients(clipped, behaviour, proximal, current)[0].tolist() == pytest.approx([0.0, -1.95, 0.35, 0.0])
