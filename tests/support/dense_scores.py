"""The oracle of tests and benchmarks: log-prob and entropy of a whole vocabulary in fp64, by their definitions."""

from __future__ import annotations

import torch
from torch import Tensor

from tepo_megatron.core.types import TokenScores


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
        columns_TV = torch.arange(scaled_TV.shape[1]).expand_as(scaled_TV)
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
