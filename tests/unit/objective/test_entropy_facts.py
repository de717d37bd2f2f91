"""What docs/reference/tepo.md says in "Covariance and entropy", on a small softmax policy."""

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tepo_megatron.core.objective.values import covariance_statistic

VECTOR = st.lists(st.floats(-2, 2), min_size=6, max_size=6).map(lambda row: torch.tensor(row, dtype=torch.float64))


def _entropy(logits):
    return torch.distributions.Categorical(logits=logits).entropy()


def _covariance(logits, advantage):
    """Cov over a ~ π of log π(a) and A(a)."""
    logprob = logits.log_softmax(-1)
    policy = logprob.exp()
    return (policy * (logprob - (policy * logprob).sum()) * (advantage - (policy * advantage).sum())).sum()


@given(VECTOR, VECTOR)
def test_a_natural_gradient_step_changes_the_entropy_by_minus_the_covariance(logits, advantage):
    """For a softmax policy the natural gradient of E[A] is A itself (up to a constant): θ + η A. dH/dη = −Cov(log π, A)."""
    step = 1e-5
    slope = (_entropy(logits + step * advantage) - _entropy(logits - step * advantage)) / (2 * step)
    torch.testing.assert_close(slope, -_covariance(logits, advantage), rtol=1e-5, atol=1e-8)


@given(VECTOR, VECTOR)
def test_the_sign_of_the_covariance_is_the_sign_of_the_change(logits, advantage):
    """Cov > 0 ⇒ ΔH < 0, Cov < 0 ⇒ ΔH > 0."""
    covariance = _covariance(logits, advantage)
    assume(covariance.abs() > 1e-3)
    change = _entropy(logits + 1e-4 * advantage) - _entropy(logits)
    assert torch.sign(change) == -torch.sign(covariance)


@given(VECTOR)
def test_without_covariance_the_entropy_stays(logits):
    """Equal advantages, or a uniform policy: Cov = 0, and H changes by second order at most."""
    for policy, advantage in ((logits, torch.full((6,), 0.7)), (torch.zeros(6, dtype=torch.float64), logits)):
        assert _covariance(policy, advantage).abs() < 1e-12
        assert (_entropy(policy + 1e-4 * advantage) - _entropy(policy)).abs() < 1e-6


@given(VECTOR)
def test_gradient_of_the_entropy(logits):
    """∇_θ H = −E[(log π(a) − E log π)(∇φ(a) − E ∇φ)]; for a softmax ∇φ(a) is the a-th unit vector."""
    logits = logits.requires_grad_()
    (gradient,) = torch.autograd.grad(_entropy(logits), logits)
    logprob = logits.detach().log_softmax(-1)
    policy = logprob.exp()
    centred = torch.eye(6, dtype=torch.float64) - policy
    expected = -(policy * (logprob - (policy * logprob).sum())) @ centred
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


@given(VECTOR, VECTOR)
def test_the_token_statistic_has_the_covariance_as_its_mean(logits, advantage):
    """c(a), averaged over a ~ π with means over π, is Cov(log π, A): falling entropy is where it is positive."""
    logprob = logits.log_softmax(-1)
    policy = logprob.exp()
    statistic = covariance_statistic(logprob, advantage, (policy * logprob).sum(), (policy * advantage).sum())
    torch.testing.assert_close((policy * statistic).sum(), _covariance(logits, advantage), rtol=1e-9, atol=1e-12)
