"""What one optimizer step knows of itself before its micro-batches are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from tepo_megatron.objective.aggregate import step_denominator
from tepo_megatron.objective.checks import check_step
from tepo_megatron.objective.covariance import (
    covariance_statistic,
    exact_mean,
    largest_threshold,
    lottery_threshold,
    tickets,
)
from tepo_megatron.objective.mismatch import effective_sample_share
from tepo_megatron.objective.ratio import sequence_sum
from tepo_megatron.objective.regularize import entropy_coefficient

if TYPE_CHECKING:
    from tepo_megatron.config.objective import ObjectiveConfig
    from tepo_megatron.types import Batch


@dataclass(frozen=True)
class StepContext:
    """Statistics of the whole mini-batch of one optimizer step, the same for all its micro-batches and ranks. Detached."""

    denominator: Tensor
    """Scalar by which the sum of all numerators is divided, once."""
    logprob_mean: Tensor
    """Mean of log π_old over response tokens; scalar, like the next."""
    advantage_mean: Tensor
    effective_samples: Tensor
    """Effective sample size of π_old/π_sampler, as a share of the response tokens."""
    entropy_coefficient: float
    kl_cov_threshold: Tensor | None
    """KL-Cov penalises tokens whose covariance is at least this."""
    clip_cov_ticket: int | None
    """Clip-Cov detaches candidates whose ticket is at most this."""


def prepare_step(config: ObjectiveConfig, batch: Batch) -> StepContext:
    """The context of one optimizer step. Pure; every rank that holds the whole mini-batch gets the same without a collective.

    Args:
        batch: all sequences of the optimizer step, of all data-parallel ranks, with ``advantages_S`` and ``old_logprobs_T``;
            ``old_entropy_T`` and ``reference_logprobs_T`` where the objective needs them.

    Raises:
        ValueError: a field is missing or has another shape, a log-probability at a response token is not finite, or there is no
            response token.
    """
    check_step(batch, reference=config.needs_reference)
    assert batch.advantages_S is not None
    assert batch.old_logprobs_T is not None
    mask_T, index_T = batch.loss_mask_T, batch.sequence_index_T
    lengths_S = sequence_sum(mask_T.long(), index_T, batch.num_sequences).to(batch.old_logprobs_T.dtype)
    denominator = step_denominator(config.aggregation, lengths_S)
    logprob_R = batch.old_logprobs_T[mask_T]  # R: response tokens
    advantage_R = batch.advantages_S[index_T][mask_T]
    logprob_mean, advantage_mean = exact_mean(logprob_R), exact_mean(advantage_R)
    covariance_R = covariance_statistic(logprob_R, advantage_R, logprob_mean, advantage_mean)
    kl_cov_threshold = None if config.kl_cov is None else largest_threshold(covariance_R, config.kl_cov.fraction)
    clip_cov_ticket = None
    if config.trust_region.kind == "clip_cov":
        region = config.trust_region
        candidates_R = (covariance_R >= region.cov_low) & (covariance_R <= region.cov_high)
        tickets_R = tickets(logprob_R, advantage_R, batch.labels_T[mask_T])
        clip_cov_ticket = lottery_threshold(candidates_R, tickets_R, region.fraction)
    old_entropy = None if batch.old_entropy_T is None else exact_mean(batch.old_entropy_T[mask_T])
    return StepContext(
        denominator=denominator,
        logprob_mean=logprob_mean,
        advantage_mean=advantage_mean,
        effective_samples=effective_sample_share(logprob_R - batch.sampler_logprobs_T[mask_T]),
        entropy_coefficient=entropy_coefficient(config.entropy, old_entropy),
        kl_cov_threshold=kl_cov_threshold,
        clip_cov_ticket=clip_cov_ticket,
    )
