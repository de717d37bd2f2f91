"""Terms that act on chosen tokens: a penalty on them, or no gradient for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from tepo_megatron.config.objective.choices import ClipCov
from tepo_megatron.core.objective.ratio import log_weights, over_sequence
from tepo_megatron.core.objective.values import check_custom, token_count

if TYPE_CHECKING:
    from tepo_megatron.config.objective.custom import OwnMask, OwnPenalty
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.config.objective.terms import KLMask, KLTerm, OffPolicySequenceMask, Rejection
    from tepo_megatron.core.objective.values import StepValues, TokenValues

NOISE_MULTIPLE = 2.0  # ``tolerance: auto`` in units of the measured noise

LEAST_TOLERANCE = 1e-5  # nats; above the rounding of fp32


class Mechanism:
    """A choice must not depend on micro-batches or ranks."""

    takes_gradient: ClassVar[bool] = False  # the chosen tokens keep the surrogate's value

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> Self | None:
        """Returns ``None`` if it is off. No collective."""
        raise NotImplementedError

    def choose(self, values: TokenValues) -> Tensor | None:
        """Returns bool [T]; ``None``: every response token."""
        del values
        return None

    def penalty(self, values: TokenValues) -> Tensor | None:
        """Returns [T], differentiable, also finite at other tokens; or ``None``."""
        del values
        return None


def kl_estimate(difference_T: Tensor, estimator: Literal["k1", "k2", "k3", "abs"]) -> Tensor:
    """``difference_T``: d = log π_θ − log q. k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d, abs = |d|."""
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return difference_T**2 / 2
    if estimator == "k3":  # expm1: at a small d, exp(−d) − 1 in fp32 would lose most of its digits
        return torch.expm1(-difference_T) + difference_T
    return difference_T.abs()


def kl_penalty(term: KLTerm, delta_T: Tensor, reference_delta_T: Tensor | None) -> Tensor:
    """``importance``: tokens are drawn from π_old, so the weight exp(δ) has a gradient (docs/reference/tepo.md, equation 8)."""
    difference_T = delta_T if term.against == "old" else reference_delta_T
    assert difference_T is not None
    value_T = kl_estimate(difference_T, term.estimator)
    return term.coefficient * (value_T * delta_T.exp() if term.weight == "importance" else value_T)


@dataclass(frozen=True)
class KLPenalty(Mechanism):
    term: KLTerm

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> Self | None:
        del step
        return None if config.kl is None else cls(config.kl)

    def penalty(self, values: TokenValues) -> Tensor:
        return kl_penalty(self.term, values.delta_T, values.reference_delta_T)


@dataclass(frozen=True)
class KLCovPenalty(KLPenalty):
    threshold: Tensor

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> Self | None:
        term = config.kl_cov
        if term is None:
            return None
        highest_R = step.covariance_R.topk(token_count(term.fraction, step.covariance_R.numel())).values
        return cls(term, highest_R[-1])

    def choose(self, values: TokenValues) -> Tensor:
        return values.mask_T & (values.covariance_T >= self.threshold) & (values.covariance_T > 0)


@dataclass(frozen=True)
class KLMaskPenalty(KLPenalty):
    """Penalises A > 0 with falling entropy (docs/reference/tepo.md, equations 6 and 7)."""

    term: KLMask
    tolerance: float  # nats by which a measured entropy must fall

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> Self | None:
        term = config.kl_mask
        if term is None:
            return None
        measured = max(LEAST_TOLERANCE, NOISE_MULTIPLE * step.entropy_noise)
        return cls(term, measured if term.tolerance == "auto" else term.tolerance)

    def choose(self, values: TokenValues) -> Tensor:
        return values.mask_T & (values.advantage_T > 0) & self._falling(values)

    def _falling(self, values: TokenValues) -> Tensor:
        if self.term.falling == "covariance":
            return values.covariance_T > 0
        if self.term.falling == "first_order":
            if values.entropy_slope_T is None:
                raise ValueError(
                    "objective.kl_mask.falling = 'first_order' needs scores.entropy_slope; score with logprob_and_entropy(..., "
                    "entropy_slope=True), as objective.needs_entropy_slope says"
                )
            return values.advantage_T * values.entropy_slope_T < 0
        if values.entropy_change_T is None:
            raise ValueError(
                "objective.kl_mask.falling = 'measured' needs old_entropy_T; score the batch before the step, or "
                "choose 'covariance'"
            )
        # Two forward passes of the same weights can differ by rounding, in either direction. Without the tolerance, tokens of
        # a first update, where nothing has changed yet, would then count as falling.
        return values.entropy_change_T < -self.tolerance


@dataclass(frozen=True)
class ClipCovDetach(Mechanism):
    takes_gradient: ClassVar[bool] = True
    region: ClipCov
    highest_ticket: int  # −1 without candidates

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> Self | None:
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
    drawn = tickets_R[candidates_R].sort().values[: token_count(fraction, candidates_R.numel())]
    return int(drawn[-1]) if drawn.numel() else -1


def tickets(logprob_T: Tensor, advantage_T: Tensor, labels_T: Tensor) -> Tensor:
    """Hashes to int64 in [0, 2³²): the draw does not depend on order, micro-batches, ranks or a resume."""
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
    takes_gradient: ClassVar[bool] = True
    term: Rejection

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> Self | None:
        del step
        return None if config.rejection is None else cls(config.rejection)

    def choose(self, values: TokenValues) -> Tensor:
        # compared as logarithms, since a product over many tokens overflows
        log_T = log_weights(self.term.level, values.mismatch_T, values.index_T, values.lengths_S)
        lowest = math.log(self.term.low) if self.term.low > 0 else -math.inf
        return values.mask_T & ((log_T < lowest) | (log_T > math.log(self.term.high)))


@dataclass(frozen=True)
class OffPolicySequences(Mechanism):
    """Chooses A < 0 with a mean of log π_old − log π_θ above ``delta``."""

    takes_gradient: ClassVar[bool] = True
    term: OffPolicySequenceMask

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> Self | None:
        del step
        return None if config.opsm is None else cls(config.opsm)

    def choose(self, values: TokenValues) -> Tensor:
        fall_T = -over_sequence(values.delta_T.detach(), "geometric", values.index_T, values.lengths_S)
        return values.mask_T & (values.advantage_T < 0) & (fall_T > self.term.delta)


@dataclass(frozen=True)
class LargestSecondMoments(Mechanism):
    takes_gradient: ClassVar[bool] = True
    bound: Tensor

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> Self | None:
        return None if config.m2po is None else cls(smallest_excluded(step.mismatch_R**2, config.m2po.threshold))

    def choose(self, values: TokenValues) -> Tensor:
        return values.mask_T & (values.mismatch_T**2 >= self.bound)


def smallest_excluded(squares_R: Tensor, threshold: float) -> Tensor:
    """Returns inf if the mean is at most ``threshold`` without an exclusion."""
    ordered_R = squares_R.sort().values
    means_R = ordered_R.double().cumsum(0) / torch.arange(1, ordered_R.numel() + 1, device=ordered_R.device)
    over_R = means_R > threshold  # means of ever larger values only grow, so this is a tail
    return ordered_R[over_R][0] if over_R.any() else ordered_R.new_tensor(torch.inf)


@dataclass(frozen=True)
class _CustomMask(Mechanism):
    takes_gradient: ClassVar[bool] = True
    term: OwnMask
    statistics: Any

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> Self | None:
        return None if config.mask is None else cls(config.mask, config.mask.prepare(step))

    def choose(self, values: TokenValues) -> Tensor:
        return check_custom(self.term, self.term.choose(values, self.statistics), "choose", values.mask_T) & values.mask_T


@dataclass(frozen=True)
class _CustomPenalty(Mechanism):
    term: OwnPenalty
    statistics: Any

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> Self | None:
        return None if config.penalty is None else cls(config.penalty, config.penalty.prepare(step))

    def choose(self, values: TokenValues) -> Tensor | None:
        chosen = self.term.choose(values, self.statistics)
        return None if chosen is None else check_custom(self.term, chosen, "choose", values.mask_T) & values.mask_T

    def penalty(self, values: TokenValues) -> Tensor:
        return check_custom(self.term, self.term.penalty(values, self.statistics), "penalty", values.delta_T)


MECHANISMS: tuple[type[Mechanism], ...] = (
    KLMaskPenalty,
    KLPenalty,
    KLCovPenalty,
    ClipCovDetach,
    RejectionMask,
    OffPolicySequences,
    LargestSecondMoments,
    _CustomMask,
    _CustomPenalty,
)
"""Penalties are added in this order; add new ones last: sums then stay the same bits."""


def prepare_mechanisms(config: ObjectiveConfig, step: StepValues) -> tuple[Mechanism, ...]:
    prepared = (kind.prepare(config, step) for kind in MECHANISMS)
    return tuple(mechanism for mechanism in prepared if mechanism is not None)


def apply_mechanisms(mechanisms: Sequence[Mechanism], values: TokenValues) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns chosen tokens, tokens without gradient (bool [T]), and the penalties' sum."""
    chosen_T, detached_T = torch.zeros_like(values.mask_T), None
    penalty_T = torch.zeros_like(values.delta_T)
    for mechanism in mechanisms:
        choice_T = mechanism.choose(values)
        where_T = values.mask_T if choice_T is None else choice_T
        if choice_T is not None:
            chosen_T = chosen_T | choice_T
        if mechanism.takes_gradient:
            detached_T = where_T if detached_T is None else detached_T | where_T
        added_T = mechanism.penalty(values)
        if added_T is not None:
            penalty_T = penalty_T + torch.where(where_T, added_T, 0.0)
    return chosen_T, detached_T, penalty_T
