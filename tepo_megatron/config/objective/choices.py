"""The alternatives for the four choices that an objective is composed of: advantage, ratio, trust region, aggregation.

A field whose docstring says *our interpretation* fills a gap that the TEPO papers leave open
(docs/reference/tepo.md).
π_θ is the policy that is trained, π_old the policy before the update, δ = log π_θ − log π_old at a token of a response.
"""

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from tepo_megatron.config.base import Section
from tepo_megatron.config.objective.base import NoiseBound, ObjectiveSection
from tepo_megatron.config.objective.custom import CustomSlot, OwnAdvantage, OwnAggregation, OwnRatio, OwnTrustRegion


class _LowHigh(ObjectiveSection):
    """A trust region whose bounds are the fields ``low`` and ``high``."""

    @property
    def noise_bounds(self) -> tuple[NoiseBound, ...]:
        advice = "some are clipped by chance; set it higher, or train in a finer dtype"
        bounds = ((name, getattr(self, name)) for name in ("low", "high"))
        return tuple(NoiseBound(name, value, "ratio", advice) for name, value in bounds if value is not None)


class _Range(_LowHigh):
    """The interval [1 − low, 1 + high] for a ratio: about 0.2 for token ratios, 3e-4 for length-normalised sequence ratios."""

    low: NonNegativeFloat
    """The clip begins below a ratio of 1 − low: about 0.2 for token ratios, 3e-4 for length-normalised sequence ratios."""

    high: NonNegativeFloat
    """The clip begins above a ratio of 1 + high: about 0.2 for token ratios, 4e-4 for length-normalised sequence ratios."""

    @property
    def turning_points(self) -> tuple[float, ...]:
        return self.low, self.high

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

    @property
    def turning_points(self) -> tuple[float, ...]:
        return self.low, self.high, math.log(self.dual) / 2 if self.dual else 0.0


class ClipCov(_Range):
    """Clip, and no gradient for a few tokens drawn from those of high covariance (Clip-Cov)."""

    kind: Literal["clip_cov"] = "clip_cov"
    fraction: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """Tokens that lose their gradient, as a share of all response tokens of the step; at least one if there is a candidate."""

    cov_low: float = 1.0
    """Candidates have a covariance statistic of at least this: (log π_old − mean)(A − mean), means over the step's tokens."""

    cov_high: float = 5.0
    """Candidates have a covariance statistic of at most this."""

    @property
    def selects_tokens(self) -> bool:
        return True

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.cov_low > self.cov_high:
            raise ValueError(f"trust_region.cov_low = {self.cov_low:g} is above cov_high = {self.cov_high:g}; exchange them")
        return self


class ClipWeight(_LowHigh):
    """The ratio as a detached weight of the log-probability, bounded above (CISPO)."""

    kind: Literal["clip_weight"] = "clip_weight"
    low: Annotated[float, Field(ge=0, lt=1)] | None = None
    """The weight is at least 1 − low; null: no lower bound."""

    high: NonNegativeFloat = 4.0
    """The weight is at most 1 + high. The value is ours, to be tuned."""

    @property
    def turning_points(self) -> tuple[float, ...]:
        return (math.log1p(self.high) / 2,)


class NoTrustRegion(ObjectiveSection):
    """ratio · A, without a bound."""

    kind: Literal["none"] = "none"


class LogClip(_LowHigh):
    """δ of a token is bounded before the ratio is formed, on the side that its advantage favours: min(δ, high) where A > 0,
    max(δ, −low) where A < 0. With a sequence ratio that is GMPO's clip."""

    kind: Literal["log_clip"] = "log_clip"
    low: NonNegativeFloat = 0.4
    """Where A < 0, δ counts as no less than −low."""

    high: NonNegativeFloat = 0.4
    """Where A > 0, δ counts as no more than high."""

    @property
    def turning_points(self) -> tuple[float, ...]:
        return self.low, self.high


class LengthClip(ObjectiveSection):
    """The logarithm of an un-normalised sequence ratio is kept within ±width · √T_i, T_i response tokens (FSPO)."""

    kind: Literal["length_clip"] = "length_clip"
    width: PositiveFloat = 0.03
    """The largest logarithm, either way, of a response of one token. The value is ours, to be tuned."""

    @property
    def turning_points(self) -> tuple[float, ...]:
        return (self.width,)


class SoftGate(ObjectiveSection):
    """4/τ · σ(τ (ratio − 1)) · A: no bound; the gradient is the ratio's at 1 and fades on either side of it (SAPO)."""

    kind: Literal["soft_gate"] = "soft_gate"
    tau_positive: PositiveFloat = 1.0
    """τ where A > 0: the larger, the sooner the gradient fades."""

    tau_negative: PositiveFloat = 1.05
    """τ where A ≤ 0."""


class Divergence(ObjectiveSection):
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
    CustomSlot("trust_region"),
]


class OverlongPenaltyConfig(Section):
    """DAPO's soft penalty for long responses, added to the reward before the advantage is formed."""

    max_tokens: PositiveInt
    """Response tokens from which on a response gets the whole penalty."""

    buffer_tokens: PositiveInt
    """The penalty grows linearly, from 0, over the last so many tokens before ``max_tokens``."""

    penalty: PositiveFloat = 1.0
    """What a response of ``max_tokens`` tokens or more loses of its reward."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer_tokens >= self.max_tokens:
            raise ValueError(
                f"advantage.overlong.buffer_tokens = {self.buffer_tokens} must be below max_tokens = {self.max_tokens}"
            )
        return self


class _Advantage(ObjectiveSection):
    overlong: OverlongPenaltyConfig | None = None
    """Lowers the reward of long responses before the advantage is formed (DAPO); null: off."""


class GroupAdvantage(_Advantage):
    """Reward minus the group's mean, divided by the group's standard deviation."""

    kind: Literal["group"] = "group"
    std: Literal["sample", "population"] = "sample"
    """Divisor of the variance over a group of G responses: ``sample`` G − 1, ``population`` G. Our interpretation: G − 1."""

    eps: PositiveFloat = 1e-6
    """Added to the standard deviation before the division. Our interpretation: the sources give no value."""


class NoStdAdvantage(_Advantage):
    """Reward minus the group's mean (Dr.GRPO)."""

    kind: Literal["no_std"] = "no_std"


class LeaveOneOutAdvantage(_Advantage):
    """Reward minus the mean of the other rewards of the group."""

    kind: Literal["leave_one_out"] = "leave_one_out"


class DivideByMeanAdvantage(ObjectiveSection):
    """Reward minus the group's mean, divided by that mean (MaxRL). Rewards must not be negative; so no overlong penalty."""

    kind: Literal["divide_by_mean"] = "divide_by_mean"


class WhitenedAdvantage(_Advantage):
    """Reward minus the group's mean, then whitened over the whole rollout batch (REINFORCE++ with baseline)."""

    kind: Literal["whitened"] = "whitened"
    over: Literal["responses", "tokens"] = "responses"
    """Whose mean and standard deviation: ``responses`` weighs each response once, as the paper does; ``tokens`` by its number
    of response tokens, as verl does."""

    eps: PositiveFloat = 1e-6
    """Added to the batch's standard deviation before the division."""


class GDPOAdvantage(ObjectiveSection):
    """Several rewards for each response, the components that ``reward.verifier`` returns: each is normalised in its group as
    kind ``group`` does, then their weighted sum is divided by its standard deviation over the whole rollout batch (GDPO). A
    length penalty is one of the rewards."""

    kind: Literal["gdpo"] = "gdpo"
    weights: Annotated[tuple[PositiveFloat, ...], Field(min_length=2)] | None = None
    """One for each component, in the order of ``reward.weights``; only their proportions count. null: all weigh the same."""

    std: Literal["sample", "population"] = "sample"
    """Divisor of a variance over n responses: ``sample`` n − 1, ``population`` n."""

    eps: PositiveFloat = 1e-6
    """Added to each standard deviation before a division."""


class TokenRatio(ObjectiveSection):
    """π_θ / π_old of each token by itself: exp(δ)."""

    noise: ClassVar[str] = "ratio"
    kind: Literal["token"] = "token"


class SequenceRatio(ObjectiveSection):
    """One ratio s_i for all tokens of response i, through which they also share one gradient (GSPO)."""

    noise: ClassVar[str] = "sequence_ratio"
    kind: Literal["sequence"] = "sequence"
    length_normalized: bool = True
    """true: s_i is the geometric mean of the token ratios; false: their product."""


class SequenceTokenRatio(ObjectiveSection):
    """The value of the sequence ratio, with each token's own gradient: sg[s_i] · exp(δ − sg[δ]); sg stops the gradient."""

    noise: ClassVar[str] = "sequence_ratio"
    kind: Literal["sequence_token"] = "sequence_token"
    length_normalized: bool = True
    """true: s_i is the geometric mean of the token ratios; false: their product. Our interpretation: the mean, as in GSPO."""


class PowerMeanRatio(ObjectiveSection):
    """One ratio for all tokens of a response: the power mean of its token ratios, (Σ_t exp(p δ) / T_i)^(1/p) (HölderPO)."""

    noise: ClassVar[str] = "ratio"
    kind: Literal["power_mean"] = "power_mean"
    p: Annotated[float, Field(ge=-10, le=10)]
    """1: the arithmetic mean; 0: the geometric mean, as in GSPO. The larger, the more the largest ratios count."""


class TokenMean(ObjectiveSection):
    """Sum over response tokens, divided by their number in the whole optimizer step."""

    kind: Literal["token_mean"] = "token_mean"


class SequenceMean(ObjectiveSection):
    """Mean over the sequences of the optimizer step of each sequence's mean over its response tokens."""

    kind: Literal["sequence_mean"] = "sequence_mean"


class ConstantSum(ObjectiveSection):
    """Sum over response tokens, divided by a constant that does not depend on how long the responses turned out."""

    kind: Literal["constant"] = "constant"
    constant: PositiveFloat = 1024.0
    """The divisor, in tokens; usually the longest response allowed (``rollout.sampling.max_new_tokens``)."""

    per: Literal["sequence", "step"] = "sequence"
    """``sequence``: the divisor is the constant times the sequences of the optimizer step; ``step``: the constant alone."""


Advantage = Annotated[
    GroupAdvantage
    | NoStdAdvantage
    | LeaveOneOutAdvantage
    | DivideByMeanAdvantage
    | WhitenedAdvantage
    | GDPOAdvantage
    | OwnAdvantage,
    CustomSlot("advantage"),
]
BuiltinRatio = TokenRatio | SequenceRatio | SequenceTokenRatio | PowerMeanRatio
Ratio = Annotated[BuiltinRatio | OwnRatio, CustomSlot("ratio")]
Aggregation = Annotated[TokenMean | SequenceMean | ConstantSum | OwnAggregation, CustomSlot("aggregation")]
