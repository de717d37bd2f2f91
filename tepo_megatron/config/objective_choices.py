"""The four choices that an objective is composed of, each alternative as a section of its own.

A field whose docstring says *our interpretation* fills a gap that the TEPO papers leave open; ``docs/tepo.md`` lists them all.
π_θ is the policy that is trained, π_old the policy before the update, δ = log π_θ − log π_old at a token of a response.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from tepo_megatron.config.base import FiniteSection


class OverlongConfig(FiniteSection):
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


class _Advantage(FiniteSection):
    overlong: OverlongConfig | None = None
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


class TokenRatio(FiniteSection):
    """π_θ / π_old of each token by itself: exp(δ)."""

    kind: Literal["token"] = "token"


class SequenceRatio(FiniteSection):
    """One ratio s_i for all tokens of response i, through which they also share one gradient (GSPO)."""

    kind: Literal["sequence"] = "sequence"
    length_normalized: bool = True
    """true: s_i is the geometric mean of the token ratios; false: their product."""


class SequenceTokenRatio(FiniteSection):
    """The value of the sequence ratio, with each token's own gradient: sg[s_i] · exp(δ − sg[δ]); sg stops the gradient."""

    kind: Literal["sequence_token"] = "sequence_token"
    length_normalized: bool = True
    """true: s_i is the geometric mean of the token ratios; false: their product. Our interpretation: the mean, as in GSPO."""


class _Range(FiniteSection):
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


class ClipWeight(FiniteSection):
    """The ratio as a detached weight of the log-probability, bounded above (CISPO)."""

    kind: Literal["clip_weight"] = "clip_weight"
    low: Annotated[float, Field(ge=0, lt=1)] | None = None
    """The weight is at least 1 − low; null: no lower bound."""

    high: NonNegativeFloat = 4.0
    """The weight is at most 1 + high. The value is ours, to be tuned."""


class NoTrustRegion(FiniteSection):
    """ratio · A, without a bound."""

    kind: Literal["none"] = "none"


class TokenMean(FiniteSection):
    """Sum over response tokens, divided by their number in the whole optimizer step."""

    kind: Literal["token_mean"] = "token_mean"


class SequenceMean(FiniteSection):
    """Mean over the sequences of the optimizer step of each sequence's mean over its response tokens."""

    kind: Literal["sequence_mean"] = "sequence_mean"


class ConstantSum(FiniteSection):
    """Sum over response tokens, divided by a constant that does not depend on how long the responses turned out."""

    kind: Literal["constant"] = "constant"
    constant: PositiveFloat = 1024.0
    """The divisor, in tokens; usually the longest response allowed (``rollout.sampling.max_new_tokens``)."""

    per: Literal["sequence", "step"] = "sequence"
    """``sequence``: the divisor is the constant times the sequences of the optimizer step; ``step``: the constant alone."""


_Kind = Field(discriminator="kind")
Advantage = Annotated[GroupAdvantage | NoStdAdvantage | LeaveOneOutAdvantage, _Kind]
Ratio = Annotated[TokenRatio | SequenceRatio | SequenceTokenRatio, _Kind]
TrustRegion = Annotated[Clip | ClipCov | ClipWeight | NoTrustRegion, _Kind]
Aggregation = Annotated[TokenMean | SequenceMean | ConstantSum, _Kind]
