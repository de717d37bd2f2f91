"""The objective of one optimizer step, composed of its four choices and what stands beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tepo_megatron.config.objective.custom import OwnAdvantage
from tepo_megatron.core.objective.advantage import gdpo_advantages, group_advantages, overlong_penalty, whitened_advantages
from tepo_megatron.core.objective.aggregate import token_weights
from tepo_megatron.core.objective.checks import check_scores
from tepo_megatron.core.objective.context import StepContext, prepare_step
from tepo_megatron.core.objective.covariance import covariance_statistic
from tepo_megatron.core.objective.mechanisms import choose_tokens
from tepo_megatron.core.objective.metrics import measure, token_values
from tepo_megatron.core.objective.mismatch import sampler_weights
from tepo_megatron.core.objective.own import own_advantages
from tepo_megatron.core.objective.ratio import sequence_sum
from tepo_megatron.core.objective.trust_region import bounded_ratio, surrogate
from tepo_megatron.core.objective.values import TokenValues
from tepo_megatron.core.types import Batch, ObjectiveOutput, TokenScores

if TYPE_CHECKING:
    from tepo_megatron.config.objective.section import ObjectiveConfig


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective that a config describes."""
    return Objective(config)


@dataclass(frozen=True)
class Objective:
    """A loss over batches of sequences. It holds no state: the same batch and scores give the same output.

    The order of a step: ``advantages`` of the whole rollout batch; then for each optimizer step ``prepare`` on its whole
    mini-batch; then a call for each micro-batch; then the numerators' sum over micro-batches and ranks, divided once by the
    denominator.
    """

    config: ObjectiveConfig

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the gradient flows through ``TokenScores.entropy``; without, the scores' backward is cheaper."""
        return self.config.entropy is not None

    @property
    def needs_entropy_slope(self) -> bool:
        """Whether scores of a micro-batch need ``TokenScores.entropy_slope``."""
        return self.config.kl_mask is not None and self.config.kl_mask.falling == "first_order"

    @property
    def needs_reference(self) -> bool:
        """Whether batches need ``reference_logprobs_T``."""
        return self.config.needs_reference

    def advantages(self, batch: Batch) -> Tensor:
        """Advantages fp32 [S] of the whole rollout batch, from ``rewards_S``, ``groups_S`` and the response lengths; with kind
        ``gdpo`` from ``reward_parts_SK``, where there is one."""
        choice, groups_S = self.config.advantage, batch.groups_S
        if isinstance(choice, OwnAdvantage):
            return own_advantages(choice, batch)
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
        """Denominator and statistics of one optimizer step, from its whole mini-batch; see `prepare_step`."""
        return prepare_step(self.config, batch, entropy_noise=entropy_noise)

    def __call__(self, scores: TokenScores, batch: Batch, context: StepContext) -> ObjectiveOutput:
        """A micro-batch's share of the loss.

        Args:
            scores: [T], what the policy being trained gave; values outside the loss mask are not read.
            batch: the micro-batch, of whole sequences. Those without a response token change nothing.
            context: what ``prepare`` gave for the optimizer step that the micro-batch belongs to.

        Returns:
            numerator differentiable in ``scores``; metrics as (sum, number of response tokens).

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
            token_weights(self.config.aggregation, values.mask_T, values.lengths_S, values.index_T) * objective_T
        ).sum()
        masked_T = choices.chosen_T
        metrics, extrema = measure(values, context, ratio_T, gain, weight_T, masked_T)
        return ObjectiveOutput(numerator, context.denominator, metrics, extrema, token_values(values, ratio_T, masked_T))

    def token_values(self, scores: TokenScores, batch: Batch, context: StepContext) -> TokenValues:
        """What a micro-batch's share of the loss is computed from, and what mechanisms choose tokens by; see ``__call__``."""
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
