"""The inputs of the objective's terms.

The covariance (docs/reference/tepo.md, equation 10) is c_it = (log π_old(y_it) − mean)(A_i − mean), means over the whole
optimizer step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from tepo_megatron.errors import NotFiniteError

if TYPE_CHECKING:
    from tepo_megatron.core.types import Batch, TokenScores


@dataclass(frozen=True)
class StepValues:
    """The R response tokens of an optimizer step's mini-batch: [R], detached, the same on all ranks."""

    old_logprob_R: Tensor
    """log π_old of the label."""
    advantage_R: Tensor
    labels_R: Tensor
    mismatch_R: Tensor
    """log π_old − log π_sampler."""
    covariance_R: Tensor
    old_entropy_R: Tensor | None
    entropy_noise: float = 0.0
    """Rounding noise in nats; 0 if not measured."""


@dataclass(frozen=True)
class TokenValues:
    """The T tokens of a micro-batch: [T], zero outside the loss mask except ``index_T``, ``labels_T``, ``covariance_T``."""

    mask_T: Tensor
    """bool: the response tokens."""
    index_T: Tensor
    labels_T: Tensor
    advantage_T: Tensor
    logprob_T: Tensor
    """log π_θ of the label, with gradient."""
    old_logprob_T: Tensor
    delta_T: Tensor
    """log π_θ − log π_old."""
    reference_delta_T: Tensor | None
    """log π_θ − log π_ref."""
    entropy_T: Tensor
    """H(π_θ) of the full distribution, in nats."""
    entropy_change_T: Tensor | None
    """H(π_θ) − H(π_old), detached."""
    entropy_slope_T: Tensor | None
    """See `TokenScores`."""
    mismatch_T: Tensor
    """log π_old − log π_sampler."""
    covariance_T: Tensor
    lengths_S: Tensor
    """Response tokens of each sequence, floating point."""


def covariance_statistic(logprob_T: Tensor, advantage_T: Tensor, logprob_mean: Tensor, advantage_mean: Tensor) -> Tensor:
    """Element-wise: a token has the same bits in every micro-batch."""
    return (logprob_T - logprob_mean) * (advantage_T - advantage_mean)


def exact_mean(values_T: Tensor) -> Tensor:
    """Computes in fp64, so that equal values have an equal mean; otherwise rounding errors of c would choose tokens."""
    return values_T.double().mean().to(values_T.dtype)


def token_count(fraction: float, tokens: int) -> int:
    return min(max(int(fraction * tokens), 1), tokens)


def check_step(batch: Batch, *, reference: bool) -> None:
    """Raises ValueError if a field is missing, has another shape, or is not finite at a response token."""
    if batch.advantages_S is None:
        raise ValueError("the batch has no advantages_S; fill it with objective.advantages(batch)")
    if batch.old_logprobs_T is None:
        raise ValueError("the batch has no old_logprobs_T; score it with the policy before the update")
    if reference and batch.reference_logprobs_T is None:
        raise ValueError(
            "a KL term is against the reference, but the batch has no reference_logprobs_T; score it with that model"
        )
    if batch.advantages_S.shape != (batch.num_sequences,):
        raise ValueError(f"advantages_S has shape {tuple(batch.advantages_S.shape)} for {batch.num_sequences} sequences")
    if not batch.advantages_S.isfinite().all():
        raise NotFiniteError("advantages_S holds values that are not finite; look at the rewards")
    raw = {
        "old_logprobs_T": batch.old_logprobs_T,
        "sampler_logprobs_T": batch.sampler_logprobs_T,
        "old_entropy_T": batch.old_entropy_T,
        "reference_logprobs_T": batch.reference_logprobs_T,
    }
    _check_mask(batch)
    for name, values_T in raw.items():
        if values_T is not None:
            _check_token_values(name, values_T, batch)


def check_scores(scores: TokenScores, batch: Batch) -> None:
    """Raises ValueError if a score has another shape, or is not finite at a response token."""
    _check_mask(batch)
    _check_token_values("scores.logprob", scores.logprob, batch)
    _check_token_values("scores.entropy", scores.entropy, batch)
    if scores.entropy_slope is not None:
        _check_token_values("scores.entropy_slope", scores.entropy_slope, batch)


def _check_mask(batch: Batch) -> None:
    if batch.loss_mask_T.shape != batch.tokens_T.shape:
        raise ValueError(
            f"loss_mask_T has shape {tuple(batch.loss_mask_T.shape)} but tokens_T {tuple(batch.tokens_T.shape)}; "
            "the mask needs one entry per token"
        )


def _check_token_values(name: str, values_T: Tensor, batch: Batch) -> None:
    if values_T.shape != batch.tokens_T.shape:
        raise ValueError(
            f"{name} has shape {tuple(values_T.shape)} but tokens_T {tuple(batch.tokens_T.shape)}; give one value per token"
        )
    wrong_T = batch.loss_mask_T & ~values_T.isfinite()
    if wrong_T.any():
        token = int(wrong_T.nonzero()[0])
        raise NotFiniteError(
            f"{name} is {values_T[token].item()} at token {token} (sequence {int(batch.sequence_index_T[token])}, label "
            f"{int(batch.labels_T[token])}), which is in the loss mask, so no ratio exists; score under the sampler's "
            "temperature and without a top-k or top-p mask, or take the token out of loss_mask_T"
        )
