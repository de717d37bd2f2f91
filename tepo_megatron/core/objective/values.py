"""What the terms of the objective are computed from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepValues:
    """The R response tokens of the whole mini-batch of one optimizer step: [R] each, detached, the same on all ranks."""

    old_logprob_R: Tensor
    """log π_old of the label."""
    advantage_R: Tensor
    labels_R: Tensor
    mismatch_R: Tensor
    """log π_old − log π_sampler."""
    covariance_R: Tensor
    """The covariance statistic, see ``covariance.py``."""
    old_entropy_R: Tensor | None
    """H(π_old) of the full distribution, in nats."""
    entropy_noise: float = 0.0
    """How far two entropies of the same token and weights may differ by rounding, in nats; 0 where that was not measured."""


@dataclass(frozen=True)
class TokenValues:
    """The T tokens of a micro-batch: [T] each, zero outside the loss mask, but for ``index_T``, ``labels_T`` and
    ``covariance_T``; and what is known of their S sequences.
    """

    mask_T: Tensor
    """bool: the response tokens."""
    index_T: Tensor
    """int64: the sequence that the token belongs to."""
    labels_T: Tensor
    advantage_T: Tensor
    logprob_T: Tensor
    """log π_θ of the label; the gradient flows through it."""
    old_logprob_T: Tensor
    delta_T: Tensor
    """log π_θ − log π_old."""
    reference_delta_T: Tensor | None
    """log π_θ − log π_ref, where the objective needs a reference model."""
    entropy_T: Tensor
    """H(π_θ) of the full distribution, in nats."""
    entropy_change_T: Tensor | None
    """H(π_θ) − H(π_old), detached."""
    entropy_slope_T: Tensor | None
    """The slope of H(π_θ) along a policy-gradient step on the label, see `TokenScores`; where the objective needs it."""
    mismatch_T: Tensor
    """log π_old − log π_sampler."""
    covariance_T: Tensor
    """The covariance statistic, see ``covariance.py``; detached."""
    lengths_S: Tensor
    """The response tokens of each sequence, floating point."""
