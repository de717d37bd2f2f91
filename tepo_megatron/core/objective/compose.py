"""The objective of one optimizer step. All terms have the same weights and denominator (docs/reference/tepo.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tepo_megatron.config.objective.custom import OwnAdvantage, OwnAggregation
from tepo_megatron.core.objective.advantage import gdpo_advantages, group_advantages, overlong_penalty, whitened_advantages
from tepo_megatron.core.objective.custom import custom_advantages, custom_denominator, custom_token_weights
from tepo_megatron.core.objective.mechanisms import Mechanism, choose_tokens, prepare_mechanisms
from tepo_megatron.core.objective.metrics import measure, token_values
from tepo_megatron.core.objective.ratio import effective_sample_share, sampler_weights, sequence_sum
from tepo_megatron.core.objective.trust_region import bounded_ratio, surrogate
from tepo_megatron.core.objective.values import (
    StepValues,
    TokenValues,
    check_scores,
    check_step,
    covariance_statistic,
    exact_mean,
)
from tepo_megatron.core.types import Batch, ObjectiveOutput, TokenScores

if TYPE_CHECKING:
    from tepo_megatron.config.objective.choices import Aggregation
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.config.objective.terms import EntropyBonus


@dataclass(frozen=True)
class StepContext:
    """Statistics of the whole mini-batch, equal for all micro-batches and ranks. Detached."""

    denominator: Tensor
    """Scalar; divides the sum of all numerators once."""
    logprob_mean: Tensor
    """Scalar: mean of log π_old over response tokens."""
    advantage_mean: Tensor
    effective_samples: Tensor
    """Scalar: effective sample size of π_old/π_sampler, as a share of the response tokens."""
    entropy_coefficient: float
    """0 without a bonus."""
    mechanisms: tuple[Mechanism, ...]
    """Prepared for this mini-batch."""


def _prepare_step(config: ObjectiveConfig, batch: Batch, *, entropy_noise: float = 0.0) -> StepContext:
    check_step(batch, reference=config.needs_reference)
    assert batch.advantages_S is not None
    assert batch.old_logprobs_T is not None
    mask_T, index_T = batch.loss_mask_T, batch.sequence_index_T
    lengths_S = sequence_sum(mask_T.long(), index_T, batch.num_sequences).to(batch.old_logprobs_T.dtype)
    denominator = _step_denominator(config.aggregation, lengths_S)
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
        entropy_coefficient=_entropy_coefficient(config.entropy, old_entropy),
        mechanisms=prepare_mechanisms(config, step),
    )


def _token_weights(aggregation: Aggregation, mask_T: Tensor, lengths_S: Tensor, index_T: Tensor) -> Tensor:
    if isinstance(aggregation, OwnAggregation):
        return custom_token_weights(aggregation, lengths_S, index_T, mask_T)
    if aggregation.kind != "sequence_mean":
        return mask_T.to(lengths_S.dtype)
    return mask_T / lengths_S.clamp(min=1)[index_T]


def _step_denominator(aggregation: Aggregation, lengths_S: Tensor) -> Tensor:
    """Sequences without response tokens (padding) do not count."""
    sequences = (lengths_S > 0).sum().to(lengths_S.dtype)
    if not sequences:
        raise ValueError("no sequence of this optimizer step has a response token; leave the step out, or look at loss_mask_T")
    if isinstance(aggregation, OwnAggregation):
        return custom_denominator(aggregation, lengths_S)
    if aggregation.kind == "token_mean":
        return lengths_S.sum()
    if aggregation.kind == "sequence_mean":
        return sequences
    return aggregation.constant * (sequences if aggregation.per == "sequence" else torch.ones_like(sequences))


def _entropy_coefficient(bonus: EntropyBonus | None, old_entropy_mean: Tensor | None) -> float:
    """Computes equation 13."""
    if bonus is None:
        return 0.0
    if bonus.kind == "fixed":
        return bonus.coefficient
    if old_entropy_mean is None:
        raise ValueError("objective.entropy.kind = 'adaptive' needs old_entropy_T; score the batch before the step")
    return bonus.coefficient * min(max(1 - old_entropy_mean.item() / bonus.target, 0.0), 1.0)


def build_objective(config: ObjectiveConfig) -> Objective:
    """Returns the objective that a config describes."""
    return Objective(config)


@dataclass(frozen=True)
class Objective:
    """A loss over batches of sequences, without state.

    Order of a step: ``advantages`` of the whole rollout batch; for each optimizer step ``prepare`` on its whole mini-batch; a
    call for each micro-batch; the numerators' sum over micro-batches and ranks, divided once by the denominator.
    """

    config: ObjectiveConfig

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the gradient flows through ``TokenScores.entropy``."""
        return "entropy_gradient" in self.config.needs

    @property
    def needs_entropy_slope(self) -> bool:
        return "entropy_slope" in self.config.needs

    @property
    def needs_reference(self) -> bool:
        return self.config.needs_reference

    def advantages(self, batch: Batch) -> Tensor:
        """Returns fp32 [S] for the whole rollout batch; kind ``gdpo`` uses ``reward_parts_SK`` if there are any."""
        choice, groups_S = self.config.advantage, batch.groups_S
        if isinstance(choice, OwnAdvantage):
            return custom_advantages(choice, batch)
        if choice.kind == "gdpo":
            parts_SK = batch.rewards_S.unsqueeze(1) if batch.reward_parts_SK is None else batch.reward_parts_SK
            return gdpo_advantages(parts_SK, groups_S, weights=choice.weights, std=choice.std, eps=choice.eps)
        if choice.kind == "divide_by_mean":
            return group_advantages(batch.rewards_S, groups_S, kind=choice.kind)
        lengths_S = sequence_sum(batch.loss_mask_T.long(), batch.sequence_index_T, batch.num_sequences)
        rewards_S, long = batch.rewards_S, choice.overlong
        if long is not None:
            rewards_S = rewards_S + overlong_penalty(
                lengths_S, max_tokens=long.max_tokens, buffer_tokens=long.buffer_tokens, penalty=long.penalty
            )
        if choice.kind == "whitened":
            return whitened_advantages(rewards_S, groups_S, lengths_S, over=choice.over, eps=choice.eps)
        if choice.kind == "group":
            return group_advantages(rewards_S, groups_S, std=choice.std, eps=choice.eps)
        return group_advantages(rewards_S, groups_S, kind=choice.kind)

    def prepare(self, batch: Batch, *, entropy_noise: float = 0.0) -> StepContext:
        """Computes denominator and statistics of one optimizer step. No collective.

        Args:
            batch: all sequences of the step, of all data-parallel ranks, with ``advantages_S`` and ``old_logprobs_T``;
                ``old_entropy_T`` and ``reference_logprobs_T`` if the objective needs them.
            entropy_noise: rounding noise between two entropies of one token under the same weights, in nats.

        Raises:
            ValueError: a field is missing or has another shape, a value is not finite, or there is no response token.
        """
        return _prepare_step(self.config, batch, entropy_noise=entropy_noise)

    def __call__(self, scores: TokenScores, batch: Batch, context: StepContext) -> ObjectiveOutput:
        """Returns a micro-batch's share of the loss; ``numerator`` is differentiable in ``scores``.

        Args:
            scores: [T], of the policy being trained; values outside the loss mask are not read.
            batch: whole sequences. Those without a response token change nothing.
            context: the result of ``prepare`` for this optimizer step.

        Raises:
            ValueError: shapes differ, or a score at a response token is not finite.
        """
        check_scores(scores, batch)
        values = self.token_values(scores, batch, context)
        ratio_T, held = bounded_ratio(self.config, values)
        choices = choose_tokens(context.mechanisms, values)
        gain = surrogate(self.config.trust_region, ratio_T, values, choices.detached_T, held)
        weight_T = None
        gain_T = gain.value_T
        if self.config.mismatch is not None:
            weight_T = sampler_weights(self.config.mismatch, values)
            gain_T = weight_T * gain_T
        objective_T = gain_T - choices.penalty_T()
        if self.needs_entropy_gradient:
            objective_T = objective_T + context.entropy_coefficient * values.entropy_T
        numerator = -(
            _token_weights(self.config.aggregation, values.mask_T, values.lengths_S, values.index_T) * objective_T
        ).sum()
        masked_T = choices.chosen_T
        metrics, extrema = measure(values, context.effective_samples, ratio_T, gain, weight_T, masked_T)
        return ObjectiveOutput(numerator, context.denominator, metrics, extrema, token_values(values, ratio_T, masked_T))

    def token_values(self, scores: TokenScores, batch: Batch, context: StepContext) -> TokenValues:
        """Returns the inputs of the surrogate and of mechanisms."""
        mask_T, index_T = batch.loss_mask_T, batch.sequence_index_T
        assert batch.advantages_S is not None
        assert batch.old_logprobs_T is not None
        reference_T = batch.reference_logprobs_T if self.needs_reference else None
        old_entropy_T = batch.old_entropy_T
        slope_T = scores.entropy_slope
        # `where` and not a product: outside the mask there may be rubbish, and 0 · nan is nan.
        advantage_T = torch.where(mask_T, batch.advantages_S[index_T], 0.0)
        logprob_T = torch.where(mask_T, scores.logprob, 0.0)
        old_T = torch.where(mask_T, batch.old_logprobs_T, 0.0)
        entropy_T = torch.where(mask_T, scores.entropy, 0.0)
        change_T = None if old_entropy_T is None else entropy_T.detach() - torch.where(mask_T, old_entropy_T, 0.0)
        return TokenValues(
            mask_T=mask_T,
            index_T=index_T,
            labels_T=batch.labels_T,
            advantage_T=advantage_T,
            logprob_T=logprob_T,
            old_logprob_T=old_T,
            delta_T=logprob_T - old_T,
            reference_delta_T=None if reference_T is None else logprob_T - torch.where(mask_T, reference_T, 0.0),
            entropy_T=entropy_T,
            entropy_change_T=change_T,
            entropy_slope_T=None if slope_T is None else torch.where(mask_T, slope_T.detach(), 0.0),
            mismatch_T=old_T - torch.where(mask_T, batch.sampler_logprobs_T, 0.0),
            covariance_T=covariance_statistic(old_T, advantage_T, context.logprob_mean, context.advantage_mean),
            lengths_S=sequence_sum(mask_T.to(logprob_T.dtype), index_T, batch.num_sequences),
        )
