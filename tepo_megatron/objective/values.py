"""What the terms of the objective share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenValues:
    """A micro-batch's values [T] that the terms share; zero outside the loss mask."""

    mask_T: Tensor
    index_T: Tensor
    advantage_T: Tensor
    logprob_T: Tensor
    delta_T: Tensor
    """log π_θ − log π_old."""
    reference_delta_T: Tensor | None
    entropy_T: Tensor
    entropy_change_T: Tensor | None
    """H(π_θ) − H(π_old), detached."""
    mismatch_T: Tensor
    """log π_old − log π_sampler."""
    covariance_T: Tensor
