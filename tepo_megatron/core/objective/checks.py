"""Whether a batch and its scores are fit for the objective; a ``ValueError`` says what is not, where, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from tepo_megatron.errors import NotFiniteError

if TYPE_CHECKING:
    from tepo_megatron.core.types import Batch, TokenScores


def check_step(batch: Batch, *, reference: bool) -> None:
    """Check a whole mini-batch before its optimizer step."""
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
    given = {
        "old_logprobs_T": batch.old_logprobs_T,
        "sampler_logprobs_T": batch.sampler_logprobs_T,
        "old_entropy_T": batch.old_entropy_T,
        "reference_logprobs_T": batch.reference_logprobs_T,
    }
    _check_mask(batch)
    for name, values_T in given.items():
        if values_T is not None:
            _check_token_values(name, values_T, batch)


def check_scores(scores: TokenScores, batch: Batch) -> None:
    """Check what the policy gave for a micro-batch."""
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
