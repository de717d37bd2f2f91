"""How far a ratio may carry the surrogate (docs/tepo.md, equation 5). All values [T], to be maximised."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tepo_megatron.config.objective_choices import TrustRegion


class Surrogate(NamedTuple):
    """What is maximised at each token, and where a bound of the trust region held."""

    value_T: Tensor
    clipped_low_T: Tensor
    """bool: the lower bound took the gradient of this token's ratio."""
    clipped_high_T: Tensor
    """bool: the upper bound did."""


def clipped(ratio_T: Tensor, advantage_T: Tensor, low: float, high: float, dual: float | None = None) -> Surrogate:
    """min(r A, clip(r, 1 − low, 1 + high) A); with ``dual``, at least dual · A where A < 0."""
    # The minimum makes the clip one-sided: it holds only where the ratio has moved the way that the advantage asks for.
    value_T = torch.minimum(ratio_T * advantage_T, ratio_T.clamp(1 - low, 1 + high) * advantage_T)
    above_T = (ratio_T > 1 + high) & (advantage_T > 0)
    if dual is not None:
        # where A < 0 the minimum has no bound: a ratio of 100 would count a hundredfold
        negative_T = advantage_T < 0
        above_T = above_T | (negative_T & (ratio_T > dual))
        value_T = torch.where(negative_T, torch.maximum(value_T, dual * advantage_T), value_T)
    return Surrogate(value_T, (ratio_T < 1 - low) & (advantage_T < 0), above_T)


def weighted_logprob(ratio_T: Tensor, logprob_T: Tensor, advantage_T: Tensor, low: float | None, high: float) -> Surrogate:
    """sg[clip(r)] · A · log π: no token loses its gradient, its weight is bounded (CISPO)."""
    ratio_T = ratio_T.detach()
    weight_T = ratio_T.clamp(None if low is None else 1 - low, 1 + high)
    return Surrogate(weight_T * advantage_T * logprob_T, ratio_T < weight_T, ratio_T > weight_T)


def surrogate(
    region: TrustRegion, ratio_T: Tensor, logprob_T: Tensor, advantage_T: Tensor, detached_T: Tensor | None
) -> Surrogate:
    """The surrogate under a trust region.

    ``detached_T`` (bool) marks the tokens that a mechanism deprives of their gradient; their value stays as it is.
    """
    if detached_T is not None:  # of both, since some regions send the gradient through the ratio, others through log π
        ratio_T = torch.where(detached_T, ratio_T.detach(), ratio_T)
        logprob_T = torch.where(detached_T, logprob_T.detach(), logprob_T)
    if region.kind == "clip_weight":
        return weighted_logprob(ratio_T, logprob_T, advantage_T, region.low, region.high)
    if region.kind == "none":
        never_T = torch.zeros_like(advantage_T, dtype=torch.bool)
        return Surrogate(ratio_T * advantage_T, never_T, never_T)
    return clipped(ratio_T, advantage_T, region.low, region.high, region.dual if region.kind == "clip" else None)
