"""Three of the four choices that an objective is composed of, each alternative as a section of its own; the fourth is the
trust region (``objective_regions.py``).

A field whose docstring says *our interpretation* fills a gap that the TEPO papers leave open
(docs/reference/tepo.md).
π_θ is the policy that is trained, π_old the policy before the update, δ = log π_θ − log π_old at a token of a response.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tepo_megatron.config.base import Section
from tepo_megatron.config.objective.custom import OwnAdvantage, OwnAggregation, OwnRatio
from tepo_megatron.config.objective.plugins import OwnSlot


class OverlongConfig(Section):
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


class _Advantage(Section):
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


class DivideByMeanAdvantage(Section):
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


class GDPOAdvantage(Section):
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


class TokenRatio(Section):
    """π_θ / π_old of each token by itself: exp(δ)."""

    kind: Literal["token"] = "token"


class SequenceRatio(Section):
    """One ratio s_i for all tokens of response i, through which they also share one gradient (GSPO)."""

    kind: Literal["sequence"] = "sequence"
    length_normalized: bool = True
    """true: s_i is the geometric mean of the token ratios; false: their product."""


class SequenceTokenRatio(Section):
    """The value of the sequence ratio, with each token's own gradient: sg[s_i] · exp(δ − sg[δ]); sg stops the gradient."""

    kind: Literal["sequence_token"] = "sequence_token"
    length_normalized: bool = True
    """true: s_i is the geometric mean of the token ratios; false: their product. Our interpretation: the mean, as in GSPO."""


class PowerMeanRatio(Section):
    """One ratio for all tokens of a response: the power mean of its token ratios, (Σ_t exp(p δ) / T_i)^(1/p) (HölderPO)."""

    kind: Literal["power_mean"] = "power_mean"
    p: Annotated[float, Field(ge=-10, le=10)]
    """1: the arithmetic mean; 0: the geometric mean, as in GSPO. The larger, the more the largest ratios count."""


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
    OwnSlot("advantage"),
]
UsualRatio = TokenRatio | SequenceRatio | SequenceTokenRatio | PowerMeanRatio
Ratio = Annotated[UsualRatio | OwnRatio, OwnSlot("ratio")]
Aggregation = Annotated[TokenMean | SequenceMean | ConstantSum | OwnAggregation, OwnSlot("aggregation")]
