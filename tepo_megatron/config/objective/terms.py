"""Optional terms of an objective: KL, entropy bonus, corrections for the sampler; notation as in `choices`."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat

from tepo_megatron.config.objective import custom
from tepo_megatron.config.objective.custom import CustomSlot, Need, NoiseBound, ObjectiveSection


def _acts(coefficient: Any) -> Any:
    if coefficient == 0:
        raise ValueError("a coefficient of 0 adds nothing; give a positive one, or null for the whole section")
    return coefficient


Coefficient = Annotated[PositiveFloat, BeforeValidator(_acts)]


class _KLTerm(ObjectiveSection):
    coefficient: Coefficient
    """Factor of the KL, which is subtracted from the surrogate."""

    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Computed from d = log π_θ − log q of a token: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d, abs = |d|."""

    against: Literal["old", "reference", "teacher"] = "old"
    """As ``objective.kl.against``."""

    weight: Literal["importance", "none"] = "none"
    """``importance`` multiplies by π_θ/π_old, with gradient: the mean over samples of π_old then estimates KL(π_θ‖q)."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset() if self.against == "old" else frozenset({self.against})

    turning_points: ClassVar[tuple[float, ...]] = (0.2,)  # the pull grows with the ratio, and is 0 at a ratio of 1


class KLMask(_KLTerm):
    """TEPO's token-level KL mask: penalises only response tokens with positive advantage and falling entropy."""

    coefficient: Coefficient = 1.0
    """β, factor of the KL. Our interpretation: at 1 its gradient equals the surrogate's if r · δ is the ratio times A, r =
    π_θ/π_old.
    """

    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """As ``objective.kl.estimator``. Our interpretation: k3."""

    against: Literal["old", "reference", "teacher"] = "old"
    """As ``objective.kl.against``. Our interpretation: π_old."""

    weight: Literal["importance", "none"] = "importance"
    """``importance`` multiplies by r = π_θ/π_old, with gradient. Our interpretation: k3 against π_old is then r · δ − r + 1,
    unbiased for KL(π_θ‖π_old).
    """

    falling: Literal["measured", "covariance", "first_order"] = "measured"
    """Tests ΔH < 0. ``measured``: full-vocabulary entropy is below π_old's; ``covariance``: (log π_old − mean)(A − mean) > 0
    predicts it; ``first_order``: a policy-gradient step on the token lowers it to first order, even if bf16 drowns
    measurements. Our interpretation: ``measured``.
    """

    tolerance: NonNegativeFloat | Literal["auto"] = "auto"
    """``measured`` only: nats by which entropy must fall. ``auto``: the median of ``entropy/noise`` (``engine.noise_every``),
    at least 1e-5, above fp32 rounding (docs/reference/masks.md). Our interpretation: ``auto``.
    """

    selects_tokens: ClassVar[bool] = True

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

    def _faults(self) -> Iterator[str]:
        yield from self._idle(["tolerance"], "falling", "measured")


class KL(_KLTerm):
    """Penalises KL on every response token."""

    coefficient: Coefficient = 0.04
    """Factor of the KL; 0.04 is the GRPO paper's."""

    against: Literal["old", "reference", "teacher"] = "reference"
    """q: ``old`` is π_old, before the update; ``reference`` a frozen copy of the first weights (LoRA: without adapters);
    ``teacher`` that of ``teachers``.
    """


class KLCov(_KLTerm):
    """A KL penalty on the response tokens of highest covariance (KL-Cov)."""

    coefficient: Coefficient = 1.0
    """Factor of the KL."""

    estimator: Literal["k1", "k2", "k3", "abs"] = "abs"
    """As ``objective.kl.estimator``."""

    fraction: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """Penalised share of response tokens; at least one if any covariance is positive."""

    selects_tokens: ClassVar[bool] = True

    turning_points: ClassVar[tuple[float, ...]] = ()  # the pull is the same at any ratio


class Distill(ObjectiveSection):
    """Draws the policy to a teacher (``teachers``): the divergence of every response token, subtracted from the surrogate."""

    of: Literal["sampled", "all", "top_k"] = "sampled"
    """``sampled``: an unbiased estimate of the reverse KL from the sampled token's log-probs, r (exp(−d) − 1 + d) with r =
    π_θ/π_old and d = log π_θ − log π_teacher. ``all``: the divergence over the whole vocabulary; the teacher must be on the
    trainer's ranks. ``top_k``: over the ``k`` most likely tokens of a served teacher, and all others as one.
    """

    k: Annotated[int, Field(ge=1, le=64)] = 8
    """``top_k`` only: tokens that the server names at every place; their log-probs are sent and recorded."""

    coefficient: Coefficient = 1.0
    """Factor of the divergence."""

    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """``reverse_kl``: KL(π_θ‖π_teacher); ``forward_kl``: KL(π_teacher‖π_θ); ``jsd``: the generalised Jensen–Shannon divergence.
    ``sampled`` estimates the first only.
    """

    beta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """``jsd`` only: the teacher's share of the mixture, as in GKD. null: 0.5."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"divergence"} if self.of == "all" else {"teacher"})

    turning_points: ClassVar[tuple[float, ...]] = (0.2,)

    def _faults(self) -> Iterator[str]:
        if self.of == "sampled" and self.divergence != "reverse_kl":
            yield f"distill.divergence = {self.divergence} needs more than the sampled token; set distill.of = all, or top_k"
        yield from self._idle(["beta"], "divergence", "jsd")
        yield from self._idle(["k"], "of", "top_k")


class _EntropyBonus(ObjectiveSection):
    needs: ClassVar[frozenset[Need]] = frozenset({"entropy_gradient"})


class _FixedEntropyBonus(_EntropyBonus):
    """coefficient · H(π_θ) at every response token, added to the surrogate."""

    kind: Literal["fixed"] = "fixed"
    coefficient: Coefficient
    """Factor of a token's entropy in nats."""


class _AdaptiveEntropyBonus(_EntropyBonus):
    """A bonus that fades as the entropy of π_old rises to the target.

    The factor is coefficient · clip((target − H_old) / target, 0, 1), H_old the mean over the step's response tokens. Our
    interpretation of "adaptive token-level entropy regularization".
    """

    kind: Literal["adaptive"] = "adaptive"
    coefficient: Coefficient
    """Largest factor, reached at zero entropy."""

    target: PositiveFloat
    """Mean entropy of π_old, in nats per token, from which there is no bonus."""


Level = Literal["token", "sequence", "geometric"]


class _Truncate(ObjectiveSection):
    """Importance weights π_old / π_sampler, bounded above, detached."""

    kind: Literal["truncate"] = "truncate"
    level: Level = "token"
    """``token``: one per token; ``sequence``: a response's product; ``geometric``: its geometric mean."""

    cap: PositiveFloat = 2.0
    """Largest weight."""


class _MaskOutside(ObjectiveSection):
    """Importance weights π_old / π_sampler, 0 outside [low, high], detached (IcePop)."""

    kind: Literal["mask"] = "mask"
    level: Level = "token"
    """As for kind ``truncate``."""

    low: NonNegativeFloat = 0.5
    """Smallest weight kept."""

    high: PositiveFloat = 5.0
    """Largest weight kept."""

    def _faults(self) -> Iterator[str]:
        if self.low >= self.high:
            yield f"mismatch.low = {self.low:g} must be below mismatch.high = {self.high:g}"


class Rejection(ObjectiveSection):
    """No surrogate gradient for π_old / π_sampler outside [low, high]; KL terms and bonuses stay. ``mismatch`` may join it."""

    level: Level = "geometric"
    """``token``: each by its ratio; ``sequence``: a response by the product; ``geometric``: by the geometric mean."""

    low: NonNegativeFloat
    """Smallest ratio kept: about 0.999 for ``geometric``, else 0.5."""

    high: PositiveFloat
    """Largest ratio kept: about 1.001 for ``geometric``, else 2."""

    selects_tokens: ClassVar[bool] = True

    def _faults(self) -> Iterator[str]:
        if self.low >= self.high:
            yield f"rejection.low = {self.low:g} must be below rejection.high = {self.high:g}"


class OffPolicySequenceMask(ObjectiveSection):
    """No surrogate gradient for responses of negative advantage that the policy has left (OPSM); KL terms and bonuses stay."""

    delta: PositiveFloat = 1e-4
    """Mean over its tokens of log π_old − log π_θ, in nats, above which a response is left out."""

    selects_tokens: ClassVar[bool] = True


class SecondMomentMask(ObjectiveSection):
    """No surrogate gradient for the fewest tokens of largest (log π_old − log π_sampler)² that leave a low mean (M2PO); KL
    terms and bonuses stay.
    """

    threshold: PositiveFloat = 0.04
    """Largest mean over kept tokens."""

    selects_tokens: ClassVar[bool] = True


EntropyBonus = Annotated[_FixedEntropyBonus | _AdaptiveEntropyBonus, Field(discriminator="kind")]
Mismatch = Annotated[_Truncate | _MaskOutside | custom.OwnMismatch, CustomSlot("mismatch")]
Mask = Annotated[custom.OwnMask, CustomSlot("mask")]
Penalty = Annotated[custom.OwnPenalty, CustomSlot("penalty")]
