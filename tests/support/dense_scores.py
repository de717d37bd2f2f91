"""The oracle of tests and benchmarks: log-prob and entropy of a whole vocabulary in fp64, by their definitions."""

from __future__ import annotations

import os
import shutil

import torch
from hypothesis import strategies as st
from torch import Tensor

from tepo_megatron.core.scores import fused_linear_logprob_and_entropy, logprob_and_entropy
from tepo_megatron.core.types import TokenScores

BACKENDS = ["torch", *(["cpp"] if shutil.which(os.environ.get("CXX", "c++")) else [])]


def dense_logprob_and_entropy(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    mask_T: Tensor | None = None,
    entropy_slope: bool = False,
    kept_TK: Tensor | None = None,
) -> TokenScores:
    """Computes what `logprob_and_entropy` does, from logits [T, V] in one piece; fp64 [T] each, differentiable by autograd.

    Columns from ``vocab_size`` on do not exist; −inf logits have probability 0 and add nothing to the entropy; tokens outside
    ``mask_T`` score 0. With ``kept_TK`` all columns but the label's and these are −inf.
    """
    scaled_TV = logits_TV[:, :vocab_size].double() / temperature
    if kept_TK is not None:
        columns_TV = torch.arange(scaled_TV.shape[1], device=labels_T.device).expand_as(scaled_TV)
        ids_TK = torch.cat([labels_T.unsqueeze(1), kept_TK.long()], 1)
        scaled_TV = scaled_TV.masked_fill(~(columns_TV.unsqueeze(-1) == ids_TK.unsqueeze(1)).any(-1), -torch.inf)
    logprob_TV = scaled_TV.log_softmax(-1)
    impossible_TV = logprob_TV == -torch.inf
    # the exponent and the factor are both made finite first, so that autograd never meets 0 · inf
    finite_TV = logprob_TV.masked_fill(impossible_TV, 0.0)
    entropy_T = -(finite_TV.exp() * finite_TV).masked_fill(impossible_TV, 0.0).sum(-1)
    mask_T = torch.ones_like(labels_T, dtype=torch.bool) if mask_T is None else mask_T
    label_T = torch.where(mask_T, labels_T, 0)
    logprob_T = logprob_TV.gather(1, label_T.unsqueeze(1)).squeeze(1)
    slope_T = None
    if entropy_slope:
        p_TV = logprob_TV.detach().exp()
        rise_TV = (p_TV * (finite_TV + entropy_T.unsqueeze(1))).detach()  # −∂H/∂logits
        slope_T = (p_TV * rise_TV).sum(-1) - rise_TV.gather(1, label_T.unsqueeze(1)).squeeze(1)
        slope_T = torch.where(mask_T, slope_T, 0.0)
    return TokenScores(torch.where(mask_T, logprob_T, 0.0), torch.where(mask_T, entropy_T, 0.0), slope_T)


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


def assert_scores(scores, oracle, tolerance):
    """Log-probs, entropies and slopes are those of the oracle, by a tolerance that is relative and absolute."""
    for name in (
        "logprob",
        "entropy",
        *(["entropy_slope"] if (scores.entropy_slope, oracle.entropy_slope) != (None, None) else []),
    ):
        ours, theirs = getattr(scores, name).double(), getattr(oracle, name).detach()
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def compare(logits, labels, options, weights, *, inplace, backend, tolerance, gradient_tolerance=None):
    """Scores and gradient of logits as given, in their dtype and on their device; tolerances relative and absolute.

    That of the gradient, where it differs, is relative to the largest entry.
    """
    leaf, dense = logits.clone().requires_grad_(), logits.double().requires_grad_()
    options = options | {"entropy_slope": True}
    scores = logprob_and_entropy(leaf.view_as(leaf), labels, inplace_backward=inplace, backend=backend, **options)
    oracle = dense_logprob_and_entropy(dense, labels, **options)
    assert_scores(scores, oracle, tolerance)
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    assert not scores.entropy_slope.requires_grad
    loss(scores, weights).backward()
    loss(oracle, weights).backward()
    if gradient_tolerance is not None:
        atol = gradient_tolerance * float(dense.grad.abs().max())
        close = {"rtol": gradient_tolerance, "atol": atol, "check_dtype": False}
    torch.testing.assert_close(leaf.grad, dense.grad.nan_to_num(), **close)


def compare_fused(hidden, head, labels, options, weights, *, tolerance, gradient_tolerances, backend="triton"):
    """Scores and both gradients of the head that makes no logits; ``gradient_tolerances`` are (rtol, atol)."""
    scores = fused_linear_logprob_and_entropy(hidden, head, labels, backend=backend, **options)
    dense = [leaf.detach().double().requires_grad_() for leaf in (hidden, head)]
    oracle = dense_logprob_and_entropy(dense[0] @ dense[1].t(), labels, **options)
    assert_scores(scores, oracle, tolerance)
    expected = torch.autograd.grad(loss(oracle, weights), dense)
    rtol, atol = gradient_tolerances
    for mine, theirs in zip(torch.autograd.grad(loss(scores, weights), (hidden, head)), expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=rtol, atol=atol)
