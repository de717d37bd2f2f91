"""What may stand beside the four choices of an objective: KL terms, an entropy bonus, a correction for the sampler.

A field whose docstring says *our interpretation* fills a gap that the TEPO papers leave open
(docs/reference/tepo.md).
π_θ is the policy that is trained, π_old the policy before the update, δ = log π_θ − log π_old at a token of a response.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from tepo_megatron.config.objective.base import Need, NoiseBound, ObjectiveSection
from tepo_megatron.config.objective.custom import CustomSlot, OwnMask, OwnMismatch, OwnPenalty


def _acts(coefficient: Any) -> Any:
    if coefficient == 0:
        raise ValueError("a coefficient of 0 adds nothing; give a positive one, or null for the whole section")
    return coefficient


Coefficient = Annotated[PositiveFloat, BeforeValidator(_acts)]
"""What a term is multiplied by."""


class KLTerm(ObjectiveSection):
    """The fields of every KL term."""

    coefficient: Coefficient
    """What the KL is multiplied by before it is subtracted from the surrogate."""

    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """KL of a token from d = log π_θ − log q of the sampled token: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d, abs = |d|."""

    against: Literal["old", "reference"] = "old"
    """q: ``old`` is π_old, the policy before the update; ``reference`` a frozen copy of the run's first weights."""

    weight: Literal["importance", "none"] = "none"
    """``importance`` multiplies by π_θ/π_old, with gradient, so that the mean over samples of π_old estimates KL(π_θ‖q)."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"reference"} if self.against == "reference" else ())


class KLMask(KLTerm):
    """TEPO's token-level KL mask: a KL penalty on the response tokens with a positive advantage and falling entropy only."""

    coefficient: Coefficient = 1.0
    """β, which the KL is multiplied by. Our interpretation, no value is known: at 1 the penalty's gradient is as large as the
    surrogate's where r · δ equals the ratio times A, r = π_θ/π_old."""

    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """KL of a token from d = log π_θ − log q of the sampled token: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d, abs = |d|. Our
    interpretation: k3."""

    against: Literal["old", "reference"] = "old"
    """q: ``old`` is π_old, the policy before the update; ``reference`` a frozen copy of the run's first weights. Our
    interpretation: π_old."""

    weight: Literal["importance", "none"] = "importance"
    """``importance`` multiplies by r = π_θ/π_old, with gradient. Our interpretation: with k3 against π_old the penalty is then
    r · δ − r + 1, unbiased for KL(π_θ‖π_old) under samples of π_old."""

    falling: Literal["measured", "covariance", "first_order"] = "measured"
    """How ΔH < 0 is decided at a token. ``measured``: the entropy of π_θ over the whole vocabulary is below that of π_old;
    ``covariance``: predicted, where (log π_old − mean)(A − mean) > 0; ``first_order``: a policy-gradient step on the token
    lowers the entropy of π_θ to first order, which is exact also where bf16 drowns what is measured. Our interpretation:
    ``measured``."""

    tolerance: NonNegativeFloat | Literal["auto"] = "auto"
    """``measured`` only: the entropy has to fall by more than this, in nats. ``auto``: by more than the rounding noise that the
    run measures, twice the 99th percentile of ``entropy/noise`` (``engine.noise_every``), and by 1e-5 at least, which is above
    the rounding of fp32. Our interpretation: ``auto``."""

    @property
    def selects_tokens(self) -> bool:
        return True

    @property
    def needs(self) -> frozenset[Need]:
        needs = super().needs
        if self.falling == "first_order":
            needs |= {"entropy_slope"}
        return needs | {"entropy_noise"} if self.falling == "measured" and self.tolerance == "auto" else needs

    @property
    def noise_bounds(self) -> tuple[NoiseBound, ...]:
        if self.falling != "measured" or self.tolerance == "auto":
            return ()
        advice = "some tokens count as falling by chance; set it to auto, or higher"
        return (NoiseBound("tolerance", self.tolerance, "entropy", advice),)

    @property
    def turning_points(self) -> tuple[float, ...]:
        return (0.2,)  # the pull grows with the ratio, and is 0 at a ratio of 1

    @model_validator(mode="after")
    def _tolerance_acts(self) -> Self:
        if self.falling != "measured" and self.tolerance != type(self).model_fields["tolerance"].default:
            raise ValueError(
                f"kl_mask.tolerance = {self.tolerance} does nothing beside kl_mask.falling = {self.falling!r}, which "
                "measures no entropy; leave it out, or set kl_mask.falling = 'measured'"
            )
        return self


class KL(KLTerm):
    """A KL penalty on every response token."""

    coefficient: Coefficient = 0.04
    """What the KL is multiplied by before it is subtracted from the surrogate; 0.04 is the value of the GRPO paper."""

    against: Literal["old", "reference"] = "reference"
    """q: ``old`` is π_old, the policy before the update; ``reference`` a frozen copy of the run's first weights."""

    @property
    def turning_points(self) -> tuple[float, ...]:
        return (0.2,)  # the pull grows with the ratio, and is 0 at a ratio of 1


class KLCov(KLTerm):
    """A KL penalty on the response tokens of highest covariance (KL-Cov)."""

    coefficient: Coefficient = 1.0
    """What the KL is multiplied by before it is subtracted from the surrogate."""

    estimator: Literal["k1", "k2", "k3", "abs"] = "abs"
    """KL of a token from d = log π_θ − log q of the sampled token: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d, abs = |d|."""

    fraction: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """Penalised tokens, as a share of all response tokens of the step; at least one if any covariance is positive."""

    @property
    def selects_tokens(self) -> bool:
        return True


class _EntropyBonus(ObjectiveSection):
    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"entropy_gradient"})


class FixedEntropyBonus(_EntropyBonus):
    """coefficient · H(π_θ) at every response token, added to the surrogate."""

    kind: Literal["fixed"] = "fixed"
    coefficient: Coefficient
    """What the entropy of a token, in nats, is multiplied by."""


class AdaptiveEntropyBonus(_EntropyBonus):
    """A bonus that fades as the entropy of the pre-update policy rises to the target.

    The factor is coefficient · clip((target − H_old) / target, 0, 1), H_old the mean over the response tokens of the optimizer
    step. Our interpretation of "adaptive token-level entropy regularization". It has no state, so a resume changes nothing.
    """

    kind: Literal["adaptive"] = "adaptive"
    coefficient: Coefficient
    """The largest value of the coefficient, reached where the entropy of π_old is 0."""

    target: PositiveFloat
    """The mean entropy of π_old from which on there is no bonus, in nats per token."""


Level = Literal["token", "sequence", "geometric"]
"""Of what the ratio of two policies is taken."""


class Truncate(ObjectiveSection):
    """Importance weights π_old / π_sampler, bounded above, detached."""

    kind: Literal["truncate"] = "truncate"
    level: Level = "token"
    """``token``: each token has its own weight; ``sequence``: all tokens of a response have the product of their weights;
    ``geometric``: their geometric mean."""

    cap: PositiveFloat = 2.0
    """The largest weight; larger ones are set to it."""


class MaskOutside(ObjectiveSection):
    """Importance weights π_old / π_sampler, 0 where they lie outside [low, high], detached (IcePop)."""

    kind: Literal["mask"] = "mask"
    level: Level = "token"
    """``token``: each token has its own weight; ``sequence``: all tokens of a response have the product of their weights;
    ``geometric``: their geometric mean."""

    low: NonNegativeFloat = 0.5
    """The smallest weight that is kept."""

    high: PositiveFloat = 5.0
    """The largest weight that is kept."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"mismatch.low = {self.low:g} must be below mismatch.high = {self.high:g}")
        return self


class Rejection(ObjectiveSection):
    """No gradient for what the sampler drew with a probability too far from the trainer's: where π_old / π_sampler lies outside
    [low, high]. What is kept has its weight unchanged, so that a ``mismatch`` may stand beside it."""

    level: Level = "geometric"
    """``token``: each token by its own ratio; ``sequence``: a response by the product of its tokens' ratios; ``geometric``: by
    their geometric mean, which does not depend on the length."""

    low: NonNegativeFloat
    """The smallest ratio that is kept: about 0.999 for ``geometric``, 0.5 for the others."""

    high: PositiveFloat
    """The largest ratio that is kept: about 1.001 for ``geometric``, 2 for the others."""

    @property
    def selects_tokens(self) -> bool:
        return True

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"rejection.low = {self.low:g} must be below rejection.high = {self.high:g}")
        return self


class OffPolicySequenceMask(ObjectiveSection):
    """No gradient for a response of negative advantage from which the policy has already moved away (OPSM)."""

    delta: PositiveFloat = 1e-4
    """The mean over its tokens of log π_old − log π_θ, in nats, above which a response is left out."""

    @property
    def selects_tokens(self) -> bool:
        return True


class SecondMomentMask(ObjectiveSection):
    """No gradient for the tokens with the largest (log π_old − log π_sampler)², as few as bring the mean of the others to the
    threshold (M2PO)."""

    threshold: PositiveFloat = 0.04
    """The largest mean of (log π_old − log π_sampler)² over the tokens that are kept."""

    @property
    def selects_tokens(self) -> bool:
        return True


EntropyBonus = Annotated[FixedEntropyBonus | AdaptiveEntropyBonus, Field(discriminator="kind")]
Mismatch = Annotated[Truncate | MaskOutside | OwnMismatch, CustomSlot("mismatch")]
Mask = Annotated[OwnMask, CustomSlot("mask")]
Penalty = Annotated[OwnPenalty, CustomSlot("penalty")]
