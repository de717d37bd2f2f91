"""The four choices of an objective: advantage, ratio, trust region, aggregation.

*Our interpretation* fills a gap of the TEPO papers (docs/reference/tepo.md). π_θ is the trained policy, π_old the policy before
the update, δ = log π_θ − log π_old at a response token.
"""

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from tepo_megatron.config.base import Section
from tepo_megatron.config.objective import custom
from tepo_megatron.config.objective.custom import CustomSlot, Need, NoiseBound, ObjectiveSection


class ClipRange(NamedTuple):
    """Of `next_clip_range`. For n tokens a bound is c · `length_factor` · (n / 2^log2_length)^slope; ``low``, ``high``: c.

    ``log2_length``: mean of log₂ n over the last step's tokens with an advantage.
    """

    low: float | None = None
    high: float | None = None
    low_slope: float = 0.0
    high_slope: float = 0.0
    log2_length: float = 0.0


_ADVICE = "some are clipped by chance; set it higher, or train in a finer dtype"


class _LowHigh(ObjectiveSection):
    @property
    def noise_bounds(self) -> tuple[NoiseBound, ...]:
        bounds = ((name, getattr(self, name)) for name in ("low", "high"))
        return tuple(NoiseBound(name, value, "ratio", _ADVICE) for name, value in bounds if value is not None)

    @property
    def turning_points(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in ("low", "high"))


class Clip(_LowHigh):
    """min(ratio · A, clip(ratio) · A), as in PPO; A is the advantage."""

    kind: Literal["clip"] = "clip"
    low: NonNegativeFloat | Literal["auto"]
    """``fixed``: clips below 1 − low, about 0.2 for token ratios. ``length``: c of the lower bound, about 0.03. ``auto``: c
    and a further power of n follow the last steps' ratios (``share``).
    """

    high: NonNegativeFloat | Literal["auto"]
    """The same for the upper bound, 1 + high."""

    scale: Literal["fixed", "length"] = "fixed"
    """``fixed``: one range for all responses. ``length``: bounds of the log-ratio by its usual spread, ±c/√n for a
    length-normalised ratio of n tokens, ±c √n for a product. n: the response's tokens, or with ``prefix`` those up to this one.
    """

    share: Annotated[float, Field(gt=0, lt=0.5)] | None = None
    """With ``auto``: share of the tokens of A < 0 or A > 0 outside on average. null: 0.1."""

    initial: PositiveFloat | None = None
    """With ``auto``: c before the first quantile. null: 0.03."""

    dual: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: if A < 0 the surrogate is at least ``dual`` · A; null: off."""

    @property
    def is_auto(self) -> bool:
        return "auto" in (self.low, self.high)

    def bounds(self, measured: ClipRange | None) -> tuple[float, float]:
        """``measured``: of `next_clip_range`, or None before there are any."""
        (low, high, *_), initial = measured or ClipRange(), self.initial or INITIAL_BOUND
        return ((low or initial) if self.low == "auto" else self.low), ((high or initial) if self.high == "auto" else self.high)

    def of_auto_sides(self, measured: ClipRange) -> ClipRange:
        """Returns it without fixed sides, which may have been ``auto`` when a checkpoint was written."""
        if self.low != "auto":
            measured = measured._replace(low=None, low_slope=0.0)
        if self.high != "auto":
            measured = measured._replace(high=None, high_slope=0.0)
        return measured

    @property
    def noise_bounds(self) -> tuple[NoiseBound, ...]:
        if self.scale == "fixed":
            return super().noise_bounds
        low, high = self.bounds(None)
        return NoiseBound("low", low, "token_ratio", _ADVICE), NoiseBound("high", high, "token_ratio", _ADVICE)

    @property
    def turning_points(self) -> tuple[float, ...]:
        return *self.bounds(None), math.log(self.dual) / 2 if self.dual else 0.0

    def _faults(self) -> Iterator[str]:
        if self.scale == "fixed" and self.is_auto:
            yield "trust_region.low or high = auto needs bounds that follow the length; set trust_region.scale = length"
        elif self.scale == "fixed" and self.low != "auto" and self.low >= 1:
            yield f"trust_region.low = {self.low:g} puts the lower bound 1 − low at or below 0; give 0.2 for a token ratio"
        for name in ("share", "initial"):
            if getattr(self, name) is not None and not self.is_auto:
                yield f"trust_region.{name} acts with auto bounds only; set low or high = auto, or leave {name} out"


INITIAL_BOUND, CLIPPED_SHARE = 0.03, 0.1


class ClipCov(_LowHigh):
    """Clip, and no gradient for a few tokens of high covariance (Clip-Cov)."""

    low: Annotated[float, Field(ge=0, lt=1)]
    """Clips below 1 − low: about 0.2 for token ratios, 3e-4 for length-normalised sequence ratios."""

    high: NonNegativeFloat
    """Clips above 1 + high: likewise."""

    kind: Literal["clip_cov"] = "clip_cov"
    fraction: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """Share of response tokens that lose their gradient; at least one if there is a candidate."""

    cov_low: float = 1.0
    """Candidates' least covariance (log π_old − mean)(A − mean), with means over the step's tokens."""

    cov_high: float = 5.0
    """Candidates' largest covariance."""

    selects_tokens: ClassVar[bool] = True

    def _faults(self) -> Iterator[str]:
        if self.cov_low > self.cov_high:
            yield f"trust_region.cov_low = {self.cov_low:g} is above cov_high = {self.cov_high:g}; exchange them"


class _ClipWeight(_LowHigh):
    """The ratio as detached weight of the log-probability, bounded above (CISPO)."""

    kind: Literal["clip_weight"] = "clip_weight"
    low: Annotated[float, Field(ge=0, lt=1)] | None = None
    """The weight is at least 1 − low; null: unbounded."""

    high: NonNegativeFloat = 4.0
    """The weight is at most 1 + high. Our value, to be tuned."""

    @property
    def turning_points(self) -> tuple[float, ...]:
        return (math.log1p(self.high) / 2,)


class _NoTrustRegion(ObjectiveSection):
    """ratio · A, without a bound."""

    kind: Literal["none"] = "none"


class _LogClip(_LowHigh):
    """Bounds δ before the ratio, as the advantage favours: min(δ, high) if A > 0, max(δ, −low) if A < 0. With a sequence ratio
    this is GMPO's clip.
    """

    kind: Literal["log_clip"] = "log_clip"
    low: NonNegativeFloat = 0.4
    """If A < 0, δ counts as at least −low."""

    high: NonNegativeFloat = 0.4
    """If A > 0, δ counts as at most high."""

    @property
    def noise_bounds(self) -> tuple[NoiseBound, ...]:
        return tuple(bound._replace(noise="token_ratio") for bound in super().noise_bounds)


class _LengthClip(ObjectiveSection):
    """Bounds the log of an un-normalised sequence ratio to ±width · √T_i, T_i response tokens (FSPO)."""

    kind: Literal["length_clip"] = "length_clip"
    width: PositiveFloat = 0.03
    """Bounds the log-ratio, either way, of a one-token response. Our value, to be tuned."""

    @property
    def turning_points(self) -> tuple[float, ...]:
        return (self.width,)


class _SoftGate(ObjectiveSection):
    """4/τ · σ(τ (ratio − 1)) · A: unbounded; the gradient is the ratio's at 1 and fades on either side (SAPO)."""

    kind: Literal["soft_gate"] = "soft_gate"
    tau_positive: PositiveFloat = 1.0
    """τ if A > 0: larger values fade the gradient sooner."""

    tau_negative: PositiveFloat = 1.05
    """τ if A ≤ 0."""


class _Divergence(ObjectiveSection):
    """sg[min(ratio, cap)] · A · log π_θ, except for tokens that went too far where their advantage favours (DPPO). The distance
    compares distributions over this token or any other: p of π_θ and p of π_old.
    """

    kind: Literal["divergence"] = "divergence"
    measure: Literal["tv", "kl"]
    """``tv``: |p − p_old|; ``kl``: p_old log(p_old/p) + (1 − p_old) log((1 − p_old)/(1 − p))."""

    threshold: PositiveFloat
    """Largest divergence at which a token counts: about 0.2 for ``tv``, 0.05 for ``kl``."""

    cap: PositiveFloat = 20.0
    """Bounds the weight from above."""


TrustRegion = Annotated[
    Clip | ClipCov | _ClipWeight | _LogClip | _LengthClip | _SoftGate | _Divergence | _NoTrustRegion | custom.OwnTrustRegion,
    CustomSlot("trust_region"),
]


class _OverlongPenaltyConfig(Section):
    """DAPO's soft penalty for long responses, added to the reward before the advantage."""

    max_tokens: PositiveInt
    """Response tokens from which the whole penalty applies."""

    buffer_tokens: PositiveInt
    """Tokens before ``max_tokens`` over which the penalty grows from 0."""

    penalty: PositiveFloat = 1.0
    """Subtracted at ``max_tokens`` or more."""

    def _faults(self) -> Iterator[str]:
        if self.buffer_tokens >= self.max_tokens:
            yield f"advantage.overlong.buffer_tokens = {self.buffer_tokens} must be below max_tokens = {self.max_tokens}"


class _Advantage(ObjectiveSection):
    overlong: _OverlongPenaltyConfig | None = None
    """Lowers rewards of long responses (DAPO); null: off."""


class _GroupAdvantage(_Advantage):
    """Reward minus the group's mean, divided by the group's standard deviation."""

    kind: Literal["group"] = "group"
    std: Literal["sample", "population"] = "sample"
    """Divisor of the variance over G responses: ``sample`` G − 1, ``population`` G. Our interpretation: G − 1."""

    eps: PositiveFloat = 1e-6
    """Added to the standard deviation. Our interpretation: no source gives it."""


class _NoStdAdvantage(_Advantage):
    """Reward minus the group's mean (Dr.GRPO)."""

    kind: Literal["no_std"] = "no_std"


class _LeaveOneOutAdvantage(_Advantage):
    """Reward minus the mean of the group's other rewards."""

    kind: Literal["leave_one_out"] = "leave_one_out"


class _DivideByMeanAdvantage(ObjectiveSection):
    """Reward minus the group's mean, divided by it (MaxRL). Rewards must not be negative; so no overlong penalty."""

    kind: Literal["divide_by_mean"] = "divide_by_mean"


class _WhitenedAdvantage(_Advantage):
    """Reward minus the group's mean, then whitened over the rollout batch (REINFORCE++ with baseline)."""

    kind: Literal["whitened"] = "whitened"
    over: Literal["responses", "tokens"] = "responses"
    """Mean and deviation: ``responses`` counts each once (paper), ``tokens`` by its tokens (verl)."""

    eps: PositiveFloat = 1e-6
    """Added to the batch's standard deviation."""


# kinds whose advantage is 0 in a group of equal rewards
COMPARE_REWARDS = frozenset({"group", "no_std", "leave_one_out", "divide_by_mean", "whitened"})


class GDPOAdvantage(ObjectiveSection):
    """Several rewards per response, ``reward.verifier``'s components: each is normalised as by kind ``group``; their weighted
    sum is divided by its standard deviation over the rollout batch (GDPO).
    """

    kind: Literal["gdpo"] = "gdpo"
    weights: Annotated[tuple[PositiveFloat, ...], Field(min_length=2)] | None = None
    """One per component, as in ``reward.weights``; only proportions count. null: equal."""

    std: Literal["sample", "population"] = "sample"
    """Divisor of a variance of n responses: ``sample`` n − 1, ``population`` n."""

    eps: PositiveFloat = 1e-6
    """Added to each standard deviation."""

    needs: ClassVar[frozenset[Need]] = frozenset({"reward_parts"})


class _TeacherAdvantage(ObjectiveSection):
    """The advantage of a token is log π_teacher − log π_old, on average −KL(π_old‖π_teacher). Rewards are not read."""

    kind: Literal["teacher"] = "teacher"
    needs: ClassVar[frozenset[Need]] = frozenset({"teacher"})


class _TokenRatio(ObjectiveSection):
    """π_θ / π_old of each token alone: exp(δ)."""

    noise: ClassVar[str] = "ratio"
    kind: Literal["token"] = "token"


class _SequenceRatio(ObjectiveSection):
    """One ratio s_i for all tokens of response i, which share one gradient (GSPO)."""

    noise: ClassVar[str] = "sequence_ratio"
    kind: Literal["sequence"] = "sequence"
    length_normalized: bool = True
    """true: s_i is the geometric mean of the token ratios; false: their product."""


class _SequenceTokenRatio(ObjectiveSection):
    """The sequence ratio's value with each token's gradient: sg[s_i] · exp(δ − sg[δ]); sg stops the gradient."""

    noise: ClassVar[str] = "sequence_ratio"
    kind: Literal["sequence_token"] = "sequence_token"
    length_normalized: bool = True
    """true: s_i is the geometric mean of token ratios, which readers of the TEPO papers report; false: their product."""


class _PrefixRatio(ObjectiveSection):
    """At token t the ratio of the response's first t tokens, with the token's gradient (CTPO)."""

    noise: ClassVar[str] = "sequence_ratio"
    kind: Literal["prefix"] = "prefix"
    length_normalized: bool = False
    """true: the geometric mean of the t token ratios; false: their product."""


class _PowerMeanRatio(ObjectiveSection):
    """The power mean of a response's token ratios, (Σ_t exp(p δ) / T_i)^(1/p) (HölderPO)."""

    noise: ClassVar[str] = "ratio"
    kind: Literal["power_mean"] = "power_mean"
    p: Annotated[float, Field(ge=-10, le=10)]
    """1: arithmetic mean; 0: geometric mean, as in GSPO. Larger p weighs the largest ratios more."""


class _TokenMean(ObjectiveSection):
    """Sum over response tokens, divided by their number in the optimizer step."""

    kind: Literal["token_mean"] = "token_mean"


class _SequenceMean(ObjectiveSection):
    """Mean over the optimizer step's sequences of their token means."""

    kind: Literal["sequence_mean"] = "sequence_mean"


class _ConstantSum(ObjectiveSection):
    """Sum over response tokens, divided by a constant."""

    kind: Literal["constant"] = "constant"
    constant: PositiveFloat = 1024.0
    """Divisor in tokens; usually ``rollout.sampling.max_new_tokens``."""

    per: Literal["sequence", "step"] = "sequence"
    """``sequence``: the constant times the step's sequences; ``step``: the constant alone."""


Advantage = Annotated[
    _GroupAdvantage
    | _NoStdAdvantage
    | _LeaveOneOutAdvantage
    | _DivideByMeanAdvantage
    | _WhitenedAdvantage
    | GDPOAdvantage
    | _TeacherAdvantage
    | custom.OwnAdvantage,
    CustomSlot("advantage"),
]
BuiltinRatio = _TokenRatio | _SequenceRatio | _SequenceTokenRatio | _PrefixRatio | _PowerMeanRatio
Ratio = Annotated[BuiltinRatio | custom.OwnRatio, CustomSlot("ratio")]
Aggregation = Annotated[_TokenMean | _SequenceMean | _ConstantSum | custom.OwnAggregation, CustomSlot("aggregation")]

GROUP, SEQUENCE_TOKEN, TOKEN_MEAN = _GroupAdvantage(), _SequenceTokenRatio(), _TokenMean()
