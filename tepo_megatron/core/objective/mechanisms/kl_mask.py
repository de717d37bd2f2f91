"""TEPO's token-level KL mask (docs/reference/tepo.md, "Token-level KL mask")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from tepo_megatron.core.objective.regularize import kl_penalty

if TYPE_CHECKING:
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.config.objective.terms import KLMask
    from tepo_megatron.core.objective.values import StepValues, TokenValues


NOISE_MULTIPLE = 2.0
"""``tolerance: auto`` in units of the measured noise, which is that of a difference of entropies: twice is safely above."""

LEAST_TOLERANCE = 1e-5
"""Nats; above the rounding of fp32, where the noise that was measured is less."""


@dataclass(frozen=True)
class KLMaskPenalty:
    """β · KL at response tokens with a positive advantage and falling entropy (docs/reference/tepo.md, equations 6 and 7)."""

    takes_gradient: ClassVar[bool] = False
    term: KLMask
    tolerance: float
    """Nats by which a measured entropy has to fall."""

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> KLMaskPenalty | None:
        """Of the step only the noise of its entropies is needed, for ``tolerance: auto``."""
        if config.kl_mask is None:
            return None
        given = config.kl_mask.tolerance
        return cls(config.kl_mask, max(LEAST_TOLERANCE, NOISE_MULTIPLE * step.entropy_noise) if given == "auto" else given)

    def choose(self, values: TokenValues) -> Tensor:
        """M_it = 1[A_i > 0] · 1[ΔH_it < 0].

        Raises:
            ValueError: ΔH is to be measured and H(π_old) is not known, or predicted from a slope that is not known.
        """
        return values.mask_T & (values.advantage_T > 0) & _FALLING[self.term.falling](values, self.tolerance)

    def penalty(self, values: TokenValues) -> Tensor:
        """β · KL_it, [T]."""
        return self.term.coefficient * kl_penalty(self.term, values.delta_T, values.reference_delta_T)


def _measured(values: TokenValues, tolerance: float) -> Tensor:
    """1[ΔH < −tolerance], ΔH = H(π_θ) − H(π_old) of the full distributions (our interpretation ``measured``)."""
    if values.entropy_change_T is None:
        raise ValueError(
            "objective.kl_mask.falling = 'measured' needs old_entropy_T; score the batch before the step, or "
            "choose 'covariance'"
        )
    # Two forward passes of the same weights can differ by rounding, in either direction. Without the tolerance, tokens of a
    # first update, where nothing has changed yet, would then count as falling.
    return values.entropy_change_T < -tolerance


def _covariance(values: TokenValues, tolerance: float) -> Tensor:
    """1[c > 0] of the covariance statistic, which predicts ΔH < 0 (our interpretation ``covariance``)."""
    del tolerance
    return values.covariance_T > 0


def _first_order(values: TokenValues, tolerance: float) -> Tensor:
    """1[A · slope < 0]: a step on the token, whose size is A · ratio and whose ratio is positive, lowers H(π_θ) to first order
    (our interpretation ``first_order``).
    """
    del tolerance
    if values.entropy_slope_T is None:
        raise ValueError(
            "objective.kl_mask.falling = 'first_order' needs scores.entropy_slope; score with logprob_and_entropy(..., "
            "entropy_slope=True), as objective.needs_entropy_slope says"
        )
    return values.advantage_T * values.entropy_slope_T < 0


_FALLING = {"measured": _measured, "covariance": _covariance, "first_order": _first_order}
"""The ways to decide that ΔH < 0, bool [T], by the name that ``objective.kl_mask.falling`` gives them."""
