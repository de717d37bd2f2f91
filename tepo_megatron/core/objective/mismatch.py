"""Weights for samples whose sampler's probabilities differ from the trainer's, both before the update. Detached, [T]."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tepo_megatron.config.objective.custom import OwnMismatch
from tepo_megatron.core.objective.own import own_weights
from tepo_megatron.core.objective.ratio import over_sequence

if TYPE_CHECKING:
    from tepo_megatron.config.objective.terms import Level, MaskOutside, Mismatch, Truncate
    from tepo_megatron.core.objective.values import TokenValues


def sampler_weights(correction: Mismatch, values: TokenValues) -> Tensor:
    """What multiplies the surrogate of a micro-batch, [T], detached; also by a kind of the user's own."""
    if isinstance(correction, OwnMismatch):
        return own_weights(correction, values)
    return mismatch_weights(correction, values.mismatch_T, values.index_T, values.lengths_S)


def mismatch_weights(correction: Truncate | MaskOutside, difference_T: Tensor, index_T: Tensor, lengths_S: Tensor) -> Tensor:
    """π_old / π_sampler of each token, or of each sequence as the product or the geometric mean over its tokens: bounded above
    by ``cap`` (truncated importance sampling), or 0 outside [low, high] (masked importance sampling, IcePop).

    ``difference_T`` is log π_old − log π_sampler, 0 outside the loss mask; ``lengths_S`` counts response tokens. The weights
    multiply the surrogate, nothing else.
    """
    weight_T = log_weights(correction.level, difference_T, index_T, lengths_S).exp()
    if correction.kind == "truncate":
        return weight_T.clamp(max=correction.cap)
    # 0 and not the nearer bound: a token whose two probabilities differ that much is taken for wrong, and counts nothing
    inside_T = (weight_T >= correction.low) & (weight_T <= correction.high)
    return torch.where(inside_T, weight_T, 0.0)


def log_weights(level: Level, difference_T: Tensor, index_T: Tensor, lengths_S: Tensor) -> Tensor:
    """log π_old − log π_sampler at each token: its own, or the sum or the mean over its sequence; detached."""
    difference_T = difference_T.detach()
    return difference_T if level == "token" else over_sequence(difference_T, level, index_T, lengths_S)


def effective_sample_share(difference_T: Tensor) -> Tensor:
    """(Σw)² / (N Σw²) of w = π_old / π_sampler over N tokens: 1 where all weights are equal; a scalar, 1 for N = 0."""
    if not difference_T.numel():
        return difference_T.new_ones(())
    weight_T = (difference_T.double() - difference_T.double().max()).exp()  # the share does not change with the scale
    return (weight_T.sum() ** 2 / (weight_T.numel() * (weight_T**2).sum())).to(difference_T.dtype)
