"""Mechanisms that take the gradient of tokens, and custom masks and penalties."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from tepo_megatron.config.objective.choices import ClipCov
from tepo_megatron.core.objective.custom import check_token_mask, check_token_values
from tepo_megatron.core.objective.mechanisms.mechanism import Mechanism
from tepo_megatron.core.objective.ratio import log_weights, over_sequence
from tepo_megatron.core.objective.values import token_count

if TYPE_CHECKING:
    from tepo_megatron.config.objective.custom import OwnMask, OwnPenalty
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.config.objective.terms import OffPolicySequenceMask, Rejection
    from tepo_megatron.core.objective.values import StepValues, TokenValues


@dataclass(frozen=True)
class ClipCovDetach(Mechanism):
    """Draws a ``fraction`` of all response tokens from those with a covariance in a range."""

    takes_gradient: ClassVar[bool] = True
    region: ClipCov
    highest_ticket: int
    """−1 without candidates."""

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> ClipCovDetach | None:
        region = config.trust_region
        if not isinstance(region, ClipCov):
            return None
        tickets_R = tickets(step.old_logprob_R, step.advantage_R, step.labels_R)
        return cls(region, lottery_threshold(_candidates(region, step.covariance_R), tickets_R, region.fraction))

    def choose(self, values: TokenValues) -> Tensor:
        drawn_T = tickets(values.old_logprob_T, values.advantage_T, values.labels_T) <= self.highest_ticket
        return values.mask_T & _candidates(self.region, values.covariance_T) & drawn_T


def _candidates(region: ClipCov, covariance_T: Tensor) -> Tensor:
    return (covariance_T >= region.cov_low) & (covariance_T <= region.cov_high)


def lottery_threshold(candidates_R: Tensor, tickets_R: Tensor, fraction: float) -> int:
    """Returns the highest winning ticket, −1 without candidates."""
    drawn = tickets_R[candidates_R].sort().values[: token_count(fraction, candidates_R.numel())]
    return int(drawn[-1]) if drawn.numel() else -1


def tickets(logprob_T: Tensor, advantage_T: Tensor, labels_T: Tensor) -> Tensor:
    """Hashes to int64 in [0, 2³²). The draw then does not depend on order, micro-batches, ranks or a resume."""
    hashed_T = torch.zeros_like(labels_T)
    for part_T in (labels_T, logprob_T.float().view(torch.int32).long(), advantage_T.float().view(torch.int32).long()):
        hashed_T = (hashed_T ^ part_T) & 0xFFFFFFFF
        # Shift, exclusive-or and multiply, twice: each bit of the input comes to change about half of the bits of the hash.
        for shift, factor in ((16, 0x45D9F3B), (15, 0x119DE1F3)):  # below 2³¹, so that products stay within int64
            hashed_T = ((hashed_T ^ (hashed_T >> shift)) * factor) & 0xFFFFFFFF
        hashed_T = hashed_T ^ (hashed_T >> 16)
    return hashed_T


@dataclass(frozen=True)
class RejectionMask(Mechanism):
    """Chooses tokens or responses with π_old / π_sampler outside a range."""

    takes_gradient: ClassVar[bool] = True
    term: Rejection

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> RejectionMask | None:
        del step
        return None if config.rejection is None else cls(config.rejection)

    def choose(self, values: TokenValues) -> Tensor:
        # compared as logarithms, since a product over many tokens overflows
        log_T = log_weights(self.term.level, values.mismatch_T, values.index_T, values.lengths_S)
        lowest = math.log(self.term.low) if self.term.low > 0 else -math.inf
        return values.mask_T & ((log_T < lowest) | (log_T > math.log(self.term.high)))


@dataclass(frozen=True)
class OffPolicySequences(Mechanism):
    """Chooses responses with A < 0 and a mean of log π_old − log π_θ above ``delta``."""

    takes_gradient: ClassVar[bool] = True
    term: OffPolicySequenceMask

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> OffPolicySequences | None:
        del step
        return None if config.opsm is None else cls(config.opsm)

    def choose(self, values: TokenValues) -> Tensor:
        fall_T = -over_sequence(values.delta_T.detach(), "geometric", values.index_T, values.lengths_S)
        return values.mask_T & (values.advantage_T < 0) & (fall_T > self.term.delta)


@dataclass(frozen=True)
class LargestSecondMoments(Mechanism):
    """Chooses the tokens with the largest (log π_old − log π_sampler)² of the step."""

    takes_gradient: ClassVar[bool] = True
    bound: Tensor

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> LargestSecondMoments | None:
        return None if config.m2po is None else cls(smallest_excluded(step.mismatch_R**2, config.m2po.threshold))

    def choose(self, values: TokenValues) -> Tensor:
        return values.mask_T & (values.mismatch_T**2 >= self.bound)


def smallest_excluded(squares_R: Tensor, threshold: float) -> Tensor:
    """Returns the smallest value to leave out so that the others' mean is at most ``threshold``; inf if there is none."""
    ordered_R = squares_R.sort().values
    means_R = ordered_R.double().cumsum(0) / torch.arange(1, ordered_R.numel() + 1, device=ordered_R.device)
    over_R = means_R > threshold  # means of ever larger values only grow, so this is a tail
    return ordered_R[over_R][0] if over_R.any() else ordered_R.new_tensor(torch.inf)


@dataclass(frozen=True)
class CustomMask(Mechanism):
    takes_gradient: ClassVar[bool] = True
    term: OwnMask
    statistics: Any

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> CustomMask | None:
        return None if config.mask is None else cls(config.mask, config.mask.prepare(step))

    def choose(self, values: TokenValues) -> Tensor:
        return check_token_mask(self.term, self.term.choose(values, self.statistics), values)


@dataclass(frozen=True)
class CustomPenalty(Mechanism):
    term: OwnPenalty
    statistics: Any

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> CustomPenalty | None:
        return None if config.penalty is None else cls(config.penalty, config.penalty.prepare(step))

    def choose(self, values: TokenValues) -> Tensor | None:
        chosen = self.term.choose(values, self.statistics)
        return None if chosen is None else check_token_mask(self.term, chosen, values)

    def penalty(self, values: TokenValues) -> Tensor:
        return check_token_values(self.term, self.term.penalty(values, self.statistics), "penalty", values)
