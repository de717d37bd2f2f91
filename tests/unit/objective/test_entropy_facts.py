"""The covariance statistic on a small softmax policy (docs/reference/tepo.md, "Covariance and entropy")."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.objective.values import covariance_statistic

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
