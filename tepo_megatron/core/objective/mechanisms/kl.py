"""KL penalties: on every response token, on those of highest covariance (KL-Cov), and TEPO's token-level KL mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tepo_megatron.core.objective.mechanisms.mechanism import Mechanism
from tepo_megatron.core.objective.values import token_count

if TYPE_CHECKING:
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.config.objective.terms import KL, KLCov, KLMask, KLTerm
    from tepo_megatron.core.objective.values import StepValues, TokenValues

NOISE_MULTIPLE = 2.0
"""``tolerance: auto`` in units of the measured noise."""

LEAST_TOLERANCE = 1e-5
"""Nats; above the rounding of fp32."""


def kl_estimate(difference_T: Tensor, estimator: Literal["k1", "k2", "k3", "abs"]) -> Tensor:
    """``difference_T``: d = log π_θ − log q. k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d (never negative), abs = |d|."""
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return difference_T**2 / 2
    if estimator == "k3":  # expm1: at a small d, exp(−d) − 1 in fp32 would lose most of its digits
        return torch.expm1(-difference_T) + difference_T
    return difference_T.abs()


def kl_penalty(term: KLTerm, delta_T: Tensor, reference_delta_T: Tensor | None) -> Tensor:
    """With ``weight = importance`` it multiplies by exp(δ), gradient included, since tokens are drawn from π_old.

    For k3 against π_old that is r δ − r + 1, unbiased for KL(π_θ‖π_old) (docs/reference/tepo.md, equation 8).
    """
    difference_T = delta_T if term.against == "old" else reference_delta_T
    assert difference_T is not None
    value_T = kl_estimate(difference_T, term.estimator)
    return term.coefficient * (value_T * delta_T.exp() if term.weight == "importance" else value_T)


@dataclass(frozen=True)
class KLPenalty(Mechanism):
    term: KL

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> KLPenalty | None:
        del step
        return None if config.kl is None else cls(config.kl)

    def penalty(self, values: TokenValues) -> Tensor:
        return kl_penalty(self.term, values.delta_T, values.reference_delta_T)


@dataclass(frozen=True)
class KLCovPenalty(Mechanism):
    """Penalises the ``fraction`` of the step's response tokens with the highest covariance, if positive."""

    term: KLCov
    threshold: Tensor

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> KLCovPenalty | None:
        term = config.kl_cov
        if term is None:
            return None
        highest_R = step.covariance_R.topk(token_count(term.fraction, step.covariance_R.numel())).values
        return cls(term, highest_R[-1])

    def choose(self, values: TokenValues) -> Tensor:
        return values.mask_T & (values.covariance_T >= self.threshold) & (values.covariance_T > 0)

    def penalty(self, values: TokenValues) -> Tensor:
        return kl_penalty(self.term, values.delta_T, values.reference_delta_T)


@dataclass(frozen=True)
class KLMaskPenalty(Mechanism):
    """Penalises response tokens with A > 0 and falling entropy (docs/reference/tepo.md, equations 6 and 7)."""

    term: KLMask
    tolerance: float
    """Nats by which a measured entropy has to fall."""

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> KLMaskPenalty | None:
        if config.kl_mask is None:
            return None
        measured = max(LEAST_TOLERANCE, NOISE_MULTIPLE * step.entropy_noise)
        return cls(config.kl_mask, measured if config.kl_mask.tolerance == "auto" else config.kl_mask.tolerance)

    def choose(self, values: TokenValues) -> Tensor:
        return values.mask_T & (values.advantage_T > 0) & _FALLING[self.term.falling](values, self.tolerance)

    def penalty(self, values: TokenValues) -> Tensor:
        return kl_penalty(self.term, values.delta_T, values.reference_delta_T)


def _measured(values: TokenValues, tolerance: float) -> Tensor:
    """Our interpretation ``measured``: H(π_θ) − H(π_old) < −tolerance."""
    if values.entropy_change_T is None:
        raise ValueError(
            "objective.kl_mask.falling = 'measured' needs old_entropy_T; score the batch before the step, or "
            "choose 'covariance'"
        )
    # Two forward passes of the same weights can differ by rounding, in either direction. Without the tolerance, tokens of a
    # first update, where nothing has changed yet, would then count as falling.
    return values.entropy_change_T < -tolerance


def _covariance(values: TokenValues, tolerance: float) -> Tensor:
    """Our interpretation ``covariance``: c > 0 predicts ΔH < 0."""
    del tolerance
    return values.covariance_T > 0


def _first_order(values: TokenValues, tolerance: float) -> Tensor:
    """Our interpretation ``first_order``: a step on the token, of size A · ratio, lowers H(π_θ)."""
    del tolerance
    if values.entropy_slope_T is None:
        raise ValueError(
            "objective.kl_mask.falling = 'first_order' needs scores.entropy_slope; score with logprob_and_entropy(..., "
            "entropy_slope=True), as objective.needs_entropy_slope says"
        )
    return values.advantage_T * values.entropy_slope_T < 0


_FALLING = {"measured": _measured, "covariance": _covariance, "first_order": _first_order}
