"""The parts that an objective is composed of: each choice and regulariser as a section of its own.

A field whose docstring says *reading* fills a gap that the TEPO papers leave open; ``docs/tepo.md`` lists all of them.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from tepo_megatron.config.base import Section


class OverlongConfig(Section):
    """DAPO's soft penalty for long responses, added to the reward before the advantage is formed."""

    max_tokens: PositiveInt
    """Responses longer than this get the whole penalty."""

    buffer_tokens: PositiveInt
    """The penalty rises linearly from 0 over the last so many tokens before ``max_tokens``."""

    penalty: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer_tokens >= self.max_tokens:
            raise ValueError(
                f"advantage.overlong.buffer_tokens = {self.buffer_tokens} must be below max_tokens = {self.max_tokens}"
            )
        return self


class _Advantage(Section):
    overlong: OverlongConfig | None = None


class GroupAdvantage(_Advantage):
    """Reward minus the group's mean, divided by the group's standard deviation."""

    kind: Literal["group"] = "group"
    std: Literal["sample", "population"] = "sample"
    """Divisor G − 1 or G. Reading: the sources write std only."""

    eps: PositiveFloat = 1e-6
    """Added to the standard deviation. Reading: the sources give no value."""


class NoStdAdvantage(_Advantage):
    """Reward minus the group's mean (Dr.GRPO)."""

    kind: Literal["no_std"] = "no_std"


class LeaveOneOutAdvantage(_Advantage):
    """Reward minus the mean of the other rewards of the group."""

    kind: Literal["leave_one_out"] = "leave_one_out"


class TokenRatio(Section):
    kind: Literal["token"] = "token"


class SequenceRatio(Section):
    kind: Literal["sequence"] = "sequence"
    length_normalized: bool = True
    """Geometric mean of the token ratios (True) or their product (False). Reading."""


class SequenceTokenRatio(Section):
    """The value of the sequence ratio, with each token's own gradient: sg[s_i] · exp(δ − sg δ)."""

    kind: Literal["sequence_token"] = "sequence_token"
    length_normalized: bool = True
    """Geometric mean of the token ratios (True) or their product (False). Reading."""


class _Range(Section):
    """The interval [1 − low, 1 + high] for a ratio: about 0.2 for token ratios, 3e-4 for length-normalised sequence ratios."""

    low: NonNegativeFloat
    high: NonNegativeFloat

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
    """min(ratio · A, clip(ratio) · A)."""

    kind: Literal["clip"] = "clip"
    dual: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: where A < 0 the term is no lower than ``dual`` · A."""


class ClipCov(_Range):
    """Clip, and no gradient for a few tokens drawn from those of high covariance (Clip-Cov)."""

    kind: Literal["clip_cov"] = "clip_cov"
    fraction: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """Detached tokens, as a share of all response tokens of the optimizer step; at least one where there is a candidate."""

    cov_low: float = 1.0
    cov_high: float = 5.0
    """Candidates have a covariance statistic in [cov_low, cov_high]."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.cov_low > self.cov_high:
            raise ValueError(f"trust_region.cov_low = {self.cov_low:g} is above cov_high = {self.cov_high:g}; exchange them")
        return self


class ClipWeight(Section):
    """The ratio as a detached weight of the log-probability, bounded above (CISPO)."""

    kind: Literal["clip_weight"] = "clip_weight"
    low: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Lower bound 1 − low of the weight; None: no bound."""

    high: NonNegativeFloat = 4.0
    """Upper bound 1 + high of the weight. Reading: to be tuned; the value here is ours."""


class NoTrustRegion(Section):
    kind: Literal["none"] = "none"


class TokenMean(Section):
    """Sum over response tokens, divided by their number in the whole optimizer step."""

    kind: Literal["token_mean"] = "token_mean"


class SequenceMean(Section):
    """Mean over the sequences of the optimizer step of each sequence's mean over its response tokens."""

    kind: Literal["sequence_mean"] = "sequence_mean"


class ConstantSum(Section):
    """Sum over response tokens, divided by a constant that does not depend on how long the responses turned out."""

    kind: Literal["constant"] = "constant"
    constant: PositiveFloat = 1024.0
    """Usually the longest response allowed (``rollout.sampling.max_new_tokens``)."""

    per: Literal["sequence", "step"] = "sequence"
    """``sequence``: the divisor is the constant times the sequences of the optimizer step; ``step``: the constant alone."""


class KLTerm(Section):
    """The fields of every KL term. d is log π_θ − log π_old or log π_θ − log π_ref at the sampled token."""

    coefficient: NonNegativeFloat
    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """d · d²/2 · exp(−d) − 1 + d · |d|."""

    against: Literal["old", "reference"] = "old"
    weight: Literal["importance", "none"] = "none"
    """``importance`` multiplies by π_θ/π_old, with gradient, so that the mean over samples of π_old estimates KL(π_θ‖·)."""


class KLMask(KLTerm):
    """TEPO's token-level KL: only tokens with a positive advantage and falling entropy."""

    coefficient: NonNegativeFloat = 1.0
    """β. Reading: no value is known. At 1 the penalty's gradient equals the surrogate's where π_θ/π_old · δ = A."""

    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Reading."""

    against: Literal["old", "reference"] = "old"
    """Reading: π_old, the policy before the update; ``reference`` is a frozen model."""

    weight: Literal["importance", "none"] = "importance"
    """Reading: with k3 against π_old this is r·δ − r + 1, unbiased for KL(π_θ‖π_old) under samples of π_old."""

    falling: Literal["measured", "covariance"] = "measured"
    """How ΔH < 0 is decided. Reading: ``measured`` compares the two full-vocabulary entropies; ``covariance`` predicts it from
    (log π_old − mean)(A − mean) > 0."""

    tolerance: NonNegativeFloat = 1e-5
    """``measured``: ΔH < −tolerance, in nats. Reading: 1e-5, above fp32 rounding, so that a first update, where ΔH = 0, masks
    nothing."""


class KL(KLTerm):
    """A KL penalty on every response token."""

    coefficient: NonNegativeFloat = 0.04
    against: Literal["old", "reference"] = "reference"


class KLCov(KLTerm):
    """A KL penalty on the response tokens of highest covariance (KL-Cov)."""

    coefficient: NonNegativeFloat = 1.0
    estimator: Literal["k1", "k2", "k3", "abs"] = "abs"
    fraction: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """Penalised tokens, as a share of all response tokens of the optimizer step; at least one."""


class FixedEntropyBonus(Section):
    kind: Literal["fixed"] = "fixed"
    coefficient: NonNegativeFloat


class AdaptiveEntropyBonus(Section):
    """A bonus that fades as the entropy of the pre-update policy rises to the target.

    Reading, of "adaptive token-level entropy regularization": coefficient · clip((target − H_old) / target, 0, 1), with H_old
    the mean over the response tokens of the optimizer step. It has no state, so it is the same after a resume.
    """

    kind: Literal["adaptive"] = "adaptive"
    coefficient: NonNegativeFloat
    """Its largest value, reached at entropy 0."""

    target: PositiveFloat
    """Nats per token."""


class Truncate(Section):
    """Importance weights π_old / π_sampler, bounded above, detached."""

    kind: Literal["truncate"] = "truncate"
    level: Literal["token", "sequence"] = "token"
    cap: PositiveFloat = 2.0


class MaskOutside(Section):
    """The same weights, and 0 where they lie outside [low, high] (IcePop)."""

    kind: Literal["mask"] = "mask"
    level: Literal["token", "sequence"] = "token"
    low: NonNegativeFloat = 0.5
    high: PositiveFloat = 5.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"mismatch.low = {self.low:g} must be below mismatch.high = {self.high:g}")
        return self


_Kind = Field(discriminator="kind")
Advantage = Annotated[GroupAdvantage | NoStdAdvantage | LeaveOneOutAdvantage, _Kind]
Ratio = Annotated[TokenRatio | SequenceRatio | SequenceTokenRatio, _Kind]
TrustRegion = Annotated[Clip | ClipCov | ClipWeight | NoTrustRegion, _Kind]
Aggregation = Annotated[TokenMean | SequenceMean | ConstantSum, _Kind]
EntropyBonus = Annotated[FixedEntropyBonus | AdaptiveEntropyBonus, _Kind]
Mismatch = Annotated[Truncate | MaskOutside, _Kind]
