"""Random calls of `logprob_and_entropy`, and their comparison with the dense fp64 oracle."""

import os
import shutil

import torch
from hypothesis import strategies as st

from tepo_megatron.core.scores import logprob_and_entropy
from tests.support.dense_scores import dense_logprob_and_entropy

BACKENDS = ["torch", *(["cpp"] if shutil.which(os.environ.get("CXX", "c++")) else [])]


@st.composite
def cases(draw, max_width=40):
    """Logits [T, V] with some −inf, labels, and all options; also T = 0 and one-column vocabularies."""
    tokens, width = draw(st.integers(0, 9)), draw(st.integers(1, max_width))
    vocab = draw(st.integers(1, width))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    logits = draw(st.sampled_from([0.1, 3.0, 30.0])) * torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    logits += draw(st.sampled_from([0.0, 1000.0, -1000.0]))
    excluded = torch.rand(tokens, width, generator=generator) < draw(st.sampled_from([0.0, 0.5]))
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    excluded[torch.arange(tokens), labels] = False
    logits[excluded] = -torch.inf
    mask = torch.rand(tokens, generator=generator) < 0.6 if draw(st.booleans()) else None
    options = {"temperature": draw(st.sampled_from([0.3, 1.0, 2.0])), "vocab_size": vocab, "mask_T": mask}
    return logits, labels, options, torch.randn(2, tokens, generator=generator, dtype=torch.float64)


def loss(scores, weights):
    """``weights`` [2, T] times log-probs and entropies."""
    return (weights[0] * scores.logprob + weights[1] * scores.entropy).sum()


def compare(logits, labels, options, weights, *, inplace, backend, tolerance, gradient_tolerance=None):
    """Scores and gradient of logits as given, in their dtype and on their device; tolerances relative and absolute.

    That of the gradient, where it differs, is relative to the largest entry.
    """
    leaf, dense = logits.clone().requires_grad_(), logits.double().requires_grad_()
    options = options | {"entropy_slope": True}
    scores = logprob_and_entropy(leaf.view_as(leaf), labels, inplace_backward=inplace, backend=backend, **options)
    oracle = dense_logprob_and_entropy(dense, labels, **options)
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    torch.testing.assert_close(scores.logprob, oracle.logprob, **close)
    torch.testing.assert_close(scores.entropy, oracle.entropy, **close)
    torch.testing.assert_close(scores.entropy_slope, oracle.entropy_slope, **close)
    assert not scores.entropy_slope.requires_grad
    loss(scores, weights).backward()
    loss(oracle, weights).backward()
    if gradient_tolerance is not None:
        atol = gradient_tolerance * float(dense.grad.abs().max())
        close = {"rtol": gradient_tolerance, "atol": atol, "check_dtype": False}
    torch.testing.assert_close(leaf.grad, dense.grad.nan_to_num(), **close)
