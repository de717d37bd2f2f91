"""How far a ratio may carry the surrogate: the trust regions, each a section of its own.

π_θ is the policy that is trained, π_old the policy before the update, δ = log π_θ − log π_old at a token of a response, A its
advantage.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from tepo_megatron.config.base import Section
from tepo_megatron.config.objective.custom import OwnTrustRegion
from tepo_megatron.config.objective.plugins import OwnSlot


class _Range(Section):
    """The interval [1 − low, 1 + high] for a ratio: about 0.2 for token ratios, 3e-4 for length-normalised sequence ratios."""

    low: NonNegativeFloat
    """The clip begins below a ratio of 1 − low: about 0.2 for token ratios, 3e-4 for length-normalised sequence ratios."""

    high: NonNegativeFloat
    """The clip begins above a ratio of 1 + high: about 0.2 for token ratios, 4e-4 for length-normalised sequence ratios."""

    @field_validator("low")
    @classmethod
    def _low_below_one(cls, low: float) -> float:
        if low >= 1:
            raise ValueError(
                f"trust_region.low = {low:g} puts the lower bound 1 − low at or below 0; give about 0.2 for a token ratio, "
                "3e-4 for a sequence ratio"
            )
        return low


class Clip(_Range):
    """min(ratio · A, clip(ratio, 1 − low, 1 + high) · A), as in PPO; A is the advantage."""

    kind: Literal["clip"] = "clip"
    dual: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: where A < 0 the surrogate is no lower than ``dual`` · A, however large the ratio; null: no such bound."""


class ClipCov(_Range):
    """Clip, and no gradient for a few tokens drawn from those of high covariance (Clip-Cov)."""

    kind: Literal["clip_cov"] = "clip_cov"
    fraction: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """Tokens that lose their gradient, as a share of all response tokens of the step; at least one if there is a candidate."""

    cov_low: float = 1.0
    """Candidates have a covariance statistic of at least this: (log π_old − mean)(A − mean), means over the step's tokens."""

    cov_high: float = 5.0
    """Candidates have a covariance statistic of at most this."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.cov_low > self.cov_high:
            raise ValueError(f"trust_region.cov_low = {self.cov_low:g} is above cov_high = {self.cov_high:g}; exchange them")
        return self


class ClipWeight(Section):
    """The ratio as a detached weight of the log-probability, bounded above (CISPO)."""

    kind: Literal["clip_weight"] = "clip_weight"
    low: Annotated[float, Field(ge=0, lt=1)] | None = None
    """The weight is at least 1 − low; null: no lower bound."""

    high: NonNegativeFloat = 4.0
    """The weight is at most 1 + high. The value is ours, to be tuned."""


class NoTrustRegion(Section):
    """ratio · A, without a bound."""

    kind: Literal["none"] = "none"


class LogClip(Section):
    """δ of a token is bounded before the ratio is formed, on the side that its advantage favours: min(δ, high) where A > 0,
    max(δ, −low) where A < 0. With a sequence ratio that is GMPO's clip."""

    kind: Literal["log_clip"] = "log_clip"
    low: NonNegativeFloat = 0.4
    """Where A < 0, δ counts as no less than −low."""

    high: NonNegativeFloat = 0.4
    """Where A > 0, δ counts as no more than high."""


class LengthClip(Section):
    """The logarithm of an un-normalised sequence ratio is kept within ±width · √T_i, T_i response tokens (FSPO)."""

    kind: Literal["length_clip"] = "length_clip"
    width: PositiveFloat = 0.03
    """The largest logarithm, either way, of a response of one token. The value is ours, to be tuned."""


class SoftGate(Section):
    """4/τ · σ(τ (ratio − 1)) · A: no bound; the gradient is the ratio's at 1 and fades on either side of it (SAPO)."""

    kind: Literal["soft_gate"] = "soft_gate"
    tau_positive: PositiveFloat = 1.0
    """τ where A > 0: the larger, the sooner the gradient fades."""

    tau_negative: PositiveFloat = 1.05
    """τ where A ≤ 0."""


class Divergence(Section):
    """sg[min(ratio, cap)] · A · log π_θ, and nothing of a token whose probability has gone too far the way that its advantage
    favours (DPPO). Far is a divergence of two distributions, this token or any other: p of π_θ and p of π_old."""

    kind: Literal["divergence"] = "divergence"
    measure: Literal["tv", "kl"]
    """``tv``: |p − p_old|; ``kl``: p_old log(p_old/p) + (1 − p_old) log((1 − p_old)/(1 − p))."""

    threshold: PositiveFloat
    """The largest divergence at which a token counts: about 0.2 for ``tv``, 0.05 for ``kl``."""

    cap: PositiveFloat = 20.0
    """The largest weight; larger ratios are set to it."""


TrustRegion = Annotated[
    Clip | ClipCov | ClipWeight | LogClip | LengthClip | SoftGate | Divergence | NoTrustRegion | OwnTrustRegion,
    OwnSlot("trust_region"),
]
