"""What one optimizer step knows of itself before its micro-batches are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from tepo_megatron.core.objective.aggregate import step_denominator
from tepo_megatron.core.objective.checks import check_step
from tepo_megatron.core.objective.covariance import covariance_statistic, exact_mean
from tepo_megatron.core.objective.mechanisms import Mechanism, prepare_mechanisms
from tepo_megatron.core.objective.mismatch import effective_sample_share
from tepo_megatron.core.objective.ratio import sequence_sum
from tepo_megatron.core.objective.regularize import entropy_coefficient
from tepo_megatron.core.objective.values import StepValues

if TYPE_CHECKING:
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.core.types import Batch


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
    """The coefficient of the entropy bonus in this step; 0 without a bonus."""
    mechanisms: tuple[Mechanism, ...]
    """The KL terms and token-level mechanisms of the objective, each with what it had to know of the whole mini-batch."""


def prepare_step(config: ObjectiveConfig, batch: Batch, *, entropy_noise: float = 0.0) -> StepContext:
    """The context of one optimizer step. Pure; every rank that holds the whole mini-batch gets the same without a collective.

    Args:
        batch: all sequences of the optimizer step, of all data-parallel ranks, with ``advantages_S`` and ``old_logprobs_T``;
            ``old_entropy_T`` and ``reference_logprobs_T`` where the objective needs them.
        entropy_noise: how far two entropies of one token and the same weights may differ by rounding, in nats.

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
    step = StepValues(
        old_logprob_R=logprob_R,
        advantage_R=advantage_R,
        labels_R=batch.labels_T[mask_T],
        mismatch_R=logprob_R - batch.sampler_logprobs_T[mask_T],
        covariance_R=covariance_statistic(logprob_R, advantage_R, logprob_mean, advantage_mean),
        old_entropy_R=None if batch.old_entropy_T is None else batch.old_entropy_T[mask_T],
        entropy_noise=entropy_noise,
    )
    old_entropy = None if step.old_entropy_R is None else exact_mean(step.old_entropy_R)
    return StepContext(
        denominator=denominator,
        logprob_mean=logprob_mean,
        advantage_mean=advantage_mean,
        effective_samples=effective_sample_share(step.mismatch_R),
        entropy_coefficient=entropy_coefficient(config.entropy, old_entropy),
        mechanisms=prepare_mechanisms(config, step),
    )
