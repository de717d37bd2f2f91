"""The objective of one optimizer step (docs/reference/tepo.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_megatron.config.objective.choices import Aggregation, Clip, ClipRange
from tepo_megatron.config.objective.custom import Need, OwnAggregation
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.config.objective.terms import EntropyBonus
from tepo_megatron.core.objective.advantage import advantages
from tepo_megatron.core.objective.mechanisms import Mechanisms, kl_estimate
from tepo_megatron.core.objective.ratio import sampler_weights, sequence_sum
from tepo_megatron.core.objective.trust_region import Bounded, Surrogate, bounded_ratio, surrogate
from tepo_megatron.core.objective.values import StepValues, TokenValues, check_custom
from tepo_megatron.core.types import Batch, Checks, ObjectiveOutput, TokenScores, count_moves
from tepo_megatron.errors import NotFiniteError


@dataclass(frozen=True)
class StepContext:
    """Detached statistics of the mini-batch, equal for all micro-batches and ranks."""

    denominator: Tensor
    """Divides the sum of all numerators."""
    logprob_mean: Tensor
    """Of log π_old over response tokens."""
    advantage_mean: Tensor
    effective_samples: Tensor
    """As a share of the response tokens."""
    entropy_coefficient: float
    """0 without a bonus."""
    mechanisms: Mechanisms
    pushed_lengths: Tensor
    """Of the sequences with an advantage, shortest first."""
    clip_range: ClipRange | None = None
    """What the last steps gave for ``auto`` bounds."""


def _token_weights(aggregation: Aggregation, mask_T: Tensor, lengths_S: Tensor, index_T: Tensor) -> Tensor:
    if isinstance(aggregation, OwnAggregation):
        weights_S = check_custom(
            aggregation, aggregation.sequence_weights(lengths_S), "sequence_weights", lengths_S, "sequence"
        )
        return torch.where(mask_T, weights_S.detach()[index_T], 0.0)
    if aggregation.kind != "sequence_mean":
        return mask_T.to(lengths_S.dtype)
    return mask_T / lengths_S.clamp(min=1)[index_T]


def _step_denominator(aggregation: Aggregation, lengths_S: Tensor) -> Tensor:
    sequences = (lengths_S > 0).sum().to(lengths_S.dtype)
    if not sequences:
        raise ValueError("no sequence of this optimizer step has a response token; leave the step out, or look at loss_mask_T")
    if isinstance(aggregation, OwnAggregation):
        divisor = torch.as_tensor(aggregation.denominator(lengths_S), dtype=lengths_S.dtype, device=lengths_S.device).detach()
        if divisor.ndim or not divisor.isfinite() or divisor <= 0:
            raise ValueError(
                f"objective.aggregation {aggregation.kind!r}: {type(aggregation).__name__}.denominator gave "
                f"{divisor.tolist()} for a step of {lengths_S.numel()} sequences; give one positive number"
            )
        return divisor
    if aggregation.kind == "token_mean":
        return lengths_S.sum()
    if aggregation.kind == "sequence_mean":
        return sequences
    return aggregation.constant * (sequences if aggregation.per == "sequence" else torch.ones_like(sequences))


def _entropy_coefficient(bonus: EntropyBonus | None, old_entropy_mean: Tensor | None) -> float:
    if bonus is None:
        return 0.0
    if bonus.kind == "fixed":
        return bonus.coefficient
    if old_entropy_mean is None:
        raise ValueError("objective.entropy.kind = 'adaptive' needs old_entropy_T; score the batch before the step")
    return bonus.coefficient * min(max(1 - old_entropy_mean.item() / bonus.target, 0.0), 1.0)


def _covariance(logprob_T: Tensor, advantage_T: Tensor, logprob_mean: Tensor, advantage_mean: Tensor) -> Tensor:
    """Equation 10 of docs/reference/tepo.md."""
    return (logprob_T - logprob_mean) * (advantage_T - advantage_mean)


def _effective_sample_share(difference_T: Tensor) -> Tensor:
    """Returns (Σw)² / (N Σw²) with w = π_old / π_sampler; 1 for N = 0."""
    if not difference_T.numel():
        return difference_T.new_ones(())
    weight_T = (difference_T.double() - difference_T.double().max()).exp()  # the share does not change with the scale
    return (weight_T.sum() ** 2 / (weight_T.numel() * (weight_T**2).sum())).to(difference_T.dtype)


def _exact_mean(values_T: Tensor) -> Tensor:
    """In fp64, so that equal values have an equal mean; else rounding errors of c choose tokens."""
    return values_T.double().mean().to(values_T.dtype)


def _check_step(batch: Batch, needs: frozenset[Need]) -> None:
    needed = {
        "advantages_S": "fill it with objective.advantages(batch)",
        "old_logprobs_T": "score it with the policy before the update",
    }
    if "reference" in needs:
        needed["reference_logprobs_T"] = "a KL term is against the reference; score it with that model"
    if "teacher" in needs:
        needed["teacher_logprobs_T"] = "the objective has a teacher; score it with that model"
    for name, remedy in needed.items():
        if getattr(batch, name) is None:
            raise ValueError(f"the batch has no {name}; {remedy}")
    assert batch.advantages_S is not None
    if batch.advantages_S.shape != (batch.num_sequences,):
        raise ValueError(f"advantages_S has shape {tuple(batch.advantages_S.shape)} for {batch.num_sequences} sequences")
    if not batch.advantages_S.isfinite().all():
        raise NotFiniteError("advantages_S holds values that are not finite; look at the rewards")
    names = ("old_logprobs_T", "sampler_logprobs_T", "old_entropy_T", "reference_logprobs_T", "teacher_logprobs_T")
    _check_token_values({name: getattr(batch, name) for name in names}, batch)


def _check_token_values(values_by_name: Mapping[str, Tensor | None], batch: Batch, checks: Checks | None = None) -> None:
    """Raises ValueError (notes it in ``checks``) unless all are finite for every response token."""
    shape = tuple(batch.tokens_T.shape)
    if batch.loss_mask_T.shape != shape:
        raise ValueError(
            f"loss_mask_T has shape {tuple(batch.loss_mask_T.shape)} but tokens_T {shape}; the mask needs one entry per token"
        )
    by_name = {name: values_T for name, values_T in values_by_name.items() if values_T is not None}
    for name, values_T in by_name.items():
        if values_T.shape != shape:
            raise ValueError(f"{name} has shape {tuple(values_T.shape)} but tokens_T {shape}; give one value per token")

    def error(index: int, value: float) -> ValueError:
        name, token = list(by_name)[index // batch.num_tokens], index % batch.num_tokens
        return NotFiniteError(
            f"{name} is {value} at token {token} (sequence {int(batch.sequence_index_T[token])}, label "
            f"{int(batch.labels_T[token])}), which is in the loss mask, so no ratio exists; score under the sampler's "
            "temperature and without a top-k or top-p mask, or take the token out of loss_mask_T"
        )

    values_N = torch.cat([values_T.detach() for values_T in by_name.values()])
    noted = Checks() if checks is None else checks
    noted.refuse(batch.loss_mask_T.repeat(len(by_name)) & ~values_N.isfinite(), error, values_N)
    if checks is None:
        noted.raise_first()


def build_objective(config: ObjectiveConfig) -> Objective:
    """A loss without state."""
    return Objective(config)


@dataclass(frozen=True)
class Objective:
    """A loss over batches of sequences, without state.

    In a step: ``advantages`` of the whole rollout batch; ``prepare`` for each mini-batch; a call for each micro-batch. The
    numerators' sum over micro-batches and ranks is divided once by the denominator.
    """

    config: ObjectiveConfig

    @property
    def needs_entropy_slope(self) -> bool:
        return "entropy_slope" in self.config.needs

    @property
    def needs_reference(self) -> bool:
        return self.config.needs_reference

    def advantages(self, batch: Batch) -> Tensor:
        """Returns fp32 [S] for the whole rollout batch."""
        return advantages(self.config.advantage, batch)

    def _token_advantages(self, batch: Batch) -> Tensor:
        """Returns [T], 0 outside the loss mask."""
        assert batch.advantages_S is not None
        values_T = batch.advantages_S[batch.sequence_index_T]
        if self.config.advantage.kind == "teacher":
            assert batch.teacher_logprobs_T is not None
            assert batch.old_logprobs_T is not None
            values_T = batch.teacher_logprobs_T - batch.old_logprobs_T
        return torch.where(batch.loss_mask_T, values_T, 0.0)

    def prepare(self, batch: Batch, *, entropy_noise: float = 0.0, clip_range: ClipRange | None = None) -> StepContext:
        """Computes the statistics of one optimizer step, whose batch is that of all data-parallel ranks. No collective.

        ``entropy_noise``: rounding noise of a token's entropy, in nats. ``clip_range``: of `next_clip_range`.
        Raises ValueError if the batch is incomplete, not finite, or without a response token.
        """
        _check_step(batch, self.config.needs)
        assert batch.old_logprobs_T is not None
        region, mask_T, index_T = self.config.trust_region, batch.loss_mask_T, batch.sequence_index_T
        lengths_S = sequence_sum(mask_T.long(), index_T, batch.num_sequences).to(batch.old_logprobs_T.dtype)
        denominator = _step_denominator(self.config.aggregation, lengths_S)
        logprob_R = batch.old_logprobs_T[mask_T]  # R: response tokens
        advantage_T = self._token_advantages(batch)
        pushed_S = sequence_sum(((advantage_T != 0) & mask_T).long(), index_T, batch.num_sequences)
        advantage_R = advantage_T[mask_T]
        logprob_mean, advantage_mean = _exact_mean(logprob_R), _exact_mean(advantage_R)
        step = StepValues(
            old_logprob_R=logprob_R,
            advantage_R=advantage_R,
            labels_R=batch.labels_T[mask_T],
            mismatch_R=logprob_R - batch.sampler_logprobs_T[mask_T],
            covariance_R=_covariance(logprob_R, advantage_R, logprob_mean, advantage_mean),
            old_entropy_R=None if batch.old_entropy_T is None else batch.old_entropy_T[mask_T],
            entropy_noise=entropy_noise,
        )
        old_entropy = None if step.old_entropy_R is None else _exact_mean(step.old_entropy_R)
        return StepContext(
            denominator=denominator,
            logprob_mean=logprob_mean,
            advantage_mean=advantage_mean,
            effective_samples=_effective_sample_share(step.mismatch_R),
            entropy_coefficient=_entropy_coefficient(self.config.entropy, old_entropy),
            mechanisms=Mechanisms.prepare(self.config, step),
            pushed_lengths=lengths_S[pushed_S > 0].sort().values,
            clip_range=region.of_auto_sides(clip_range) if clip_range and isinstance(region, Clip) else None,
        )

    def __call__(self, scores: TokenScores, batch: Batch, context: StepContext) -> ObjectiveOutput:
        """Returns a micro-batch's share of the loss, differentiable in ``scores``.

        ``batch`` has whole sequences. Raises ValueError if shapes differ, or, unless ``scores.checks`` notes it, a score at a
        response token is not finite.
        """
        names = ("logprob", "entropy", "entropy_slope", "divergence")
        _check_token_values({f"scores.{name}": getattr(scores, name) for name in names}, batch, scores.checks)
        values = self.token_values(scores, batch, context)
        choices, chosen_T, detached_T = context.mechanisms.choose(values)
        trained = values if detached_T is None else values.without_gradient(detached_T)
        held = bounded_ratio(self.config, trained, context.clip_range)
        weight_T = None if self.config.mismatch is None else sampler_weights(self.config.mismatch, values)
        # after the ratio, since autograd adds gradients in the reverse order, and another order has other bits
        penalty_T = context.mechanisms.penalty(values, choices, weight_T)
        gain = surrogate(self.config, held, trained)
        gain_T = gain.value_T if weight_T is None else weight_T * gain.value_T
        objective_T = gain_T - penalty_T
        if "entropy_gradient" in self.config.needs:
            objective_T = objective_T + context.entropy_coefficient * values.entropy_T
        token_weight_T = _token_weights(self.config.aggregation, values.mask_T, values.lengths_S, values.index_T)
        numerator = -(token_weight_T * objective_T).sum()
        metrics, extrema = _measure(values, context.effective_samples, held.ratio_T, gain, weight_T, chosen_T)
        metrics |= _measure_clip(self.config, context, values, gain) | _measure_teacher(scores, batch, values)
        recorded = {"logprob_update": values.logprob_T.detach(), "ratio": held.ratio_T.detach(), "masked": chosen_T}
        recorded["advantage"] = values.advantage_T
        if (divergence_T := _from_teacher(values)) is not None:
            recorded["divergence"] = divergence_T
        if values.entropy_change_T is not None:
            recorded["entropy_change"] = values.entropy_change_T
        moves = _count_moves(self.config, values, held)
        return ObjectiveOutput(numerator, context.denominator, metrics, extrema, recorded, moves)

    def token_values(self, scores: TokenScores, batch: Batch, context: StepContext) -> TokenValues:
        mask_T, index_T = batch.loss_mask_T, batch.sequence_index_T
        assert batch.old_logprobs_T is not None

        def inside(values_T: Tensor) -> Tensor:
            """Outside the mask 0 · nan would be nan; other nans are in ``scores.checks``."""
            return torch.where(mask_T & values_T.isfinite(), values_T, 0.0)

        def moved_from(other_T: Tensor | None, *, needed: bool) -> Tensor | None:
            return logprob_T - inside(other_T) if other_T is not None and needed else None

        advantage_T, logprob_T = self._token_advantages(batch), inside(scores.logprob)
        old_T, entropy_T = inside(batch.old_logprobs_T), inside(scores.entropy)
        slope_T = scores.entropy_slope if self.needs_entropy_slope else None
        whole = self.config.distill is not None and self.config.distill.of != "sampled"
        return TokenValues(
            mask_T=mask_T,
            index_T=index_T,
            labels_T=batch.labels_T,
            advantage_T=advantage_T,
            logprob_T=logprob_T,
            old_logprob_T=old_T,
            delta_T=logprob_T - old_T,
            reference_delta_T=moved_from(batch.reference_logprobs_T, needed=self.needs_reference),
            teacher_delta_T=moved_from(batch.teacher_logprobs_T, needed="teacher" in self.config.needs),
            divergence_T=inside(scores.divergence) if scores.divergence is not None and whole else None,
            entropy_T=entropy_T,
            entropy_change_T=None if batch.old_entropy_T is None else entropy_T.detach() - inside(batch.old_entropy_T),
            entropy_slope_T=None if slope_T is None else inside(slope_T.detach()),
            mismatch_T=old_T - inside(batch.sampler_logprobs_T),
            covariance_T=_covariance(old_T, advantage_T, context.logprob_mean, context.advantage_mean),
            lengths_S=sequence_sum(mask_T.to(logprob_T.dtype), index_T, batch.num_sequences),
        )


def _over(where_T: Tensor, value_T: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(where_T, value_T, 0.0).sum(), where_T.sum().to(value_T.dtype)


@torch.no_grad()
def _measure(
    values: TokenValues, effective_samples: Tensor, ratio_T: Tensor, gain: Surrogate, weight_T: Tensor | None, masked_T: Tensor
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """KL(π_θ‖π_old) is r δ − r + 1; the mismatch is KL(sampler‖π_old) by k3."""
    mask_T = values.mask_T
    kl_T = kl_estimate(values.delta_T, "k3") * values.importance_T

    metrics = {
        "ratio/mean": _over(mask_T, ratio_T),
        "kl/mean": _over(mask_T, kl_T),
        "kl/masked": _over(masked_T, kl_T),
        "mask/fraction": _over(mask_T, masked_T.to(ratio_T.dtype)),
        "entropy/mean": _over(mask_T, values.entropy_T),
        "mismatch/kl": _over(mask_T, kl_estimate(-values.mismatch_T, "k3")),
        "ess": _over(mask_T, effective_samples.expand_as(ratio_T)),
    }
    if gain.clipped_low_T is not None:
        metrics["clip/low"] = _over(mask_T, gain.clipped_low_T.to(ratio_T.dtype))
    if gain.clipped_high_T is not None:
        metrics["clip/high"] = _over(mask_T, gain.clipped_high_T.to(ratio_T.dtype))
    if values.entropy_change_T is not None:
        metrics["entropy/delta"] = _over(mask_T, values.entropy_change_T)
        metrics["entropy/delta_masked"] = _over(masked_T, values.entropy_change_T)
        metrics["entropy/delta_unmasked"] = _over(mask_T & ~masked_T, values.entropy_change_T)
    if values.reference_delta_T is not None:
        metrics["kl/reference"] = _over(mask_T, kl_estimate(values.reference_delta_T, "k3"))
    if weight_T is not None:
        metrics["mismatch/weight"] = _over(mask_T, weight_T)
        metrics["mismatch/dropped"] = _over(mask_T, (weight_T == 0).to(ratio_T.dtype))
    extrema = {
        "ratio/min": torch.where(mask_T, ratio_T, torch.inf).amin() if mask_T.numel() else ratio_T.new_tensor(torch.inf),
        "ratio/max": torch.where(mask_T, ratio_T, -torch.inf).amax() if mask_T.numel() else ratio_T.new_tensor(-torch.inf),
    }
    return metrics, extrema


@torch.no_grad()
def _from_teacher(values: TokenValues) -> Tensor | None:
    """Returns the divergence from the teacher: of whole distributions, or estimated from the sampled token."""
    if values.divergence_T is not None:
        return values.divergence_T.detach()
    if values.teacher_delta_T is None:
        return None
    return (kl_estimate(values.teacher_delta_T, "k3") * values.importance_T).detach()


@torch.no_grad()
def _measure_teacher(scores: TokenScores, batch: Batch, values: TokenValues) -> dict[str, tuple[Tensor, Tensor]]:
    """Quarters are by place in the response."""
    value_T, mask_T, index_T = _from_teacher(values), values.mask_T, values.index_T
    if value_T is None:
        return {}

    before_S = values.lengths_S.cumsum(0) - values.lengths_S
    place_T = (mask_T.cumsum(0) - 1 - before_S[index_T]) / values.lengths_S.clamp(min=1)[index_T]
    quarters = [_over(mask_T & ((4 * place_T).floor() == number), value_T) for number in range(4)]
    metrics = {"distill/divergence": _over(mask_T, value_T)}
    metrics |= zip(
        ("distill/divergence_q1", "distill/divergence_q2", "distill/divergence_q3", "distill/divergence_q4"),
        quarters,
        strict=True,
    )
    if scores.agreement is not None:
        metrics["distill/agreement"] = _over(mask_T, scores.agreement.to(value_T.dtype))
    if batch.top_logprobs_TK is not None and values.divergence_T is not None:
        metrics["distill/mass"] = _over(mask_T, batch.top_logprobs_TK.exp().sum(1).to(value_T.dtype))
    return metrics


def _quarters(lengths_S: Tensor, sorted_N: Tensor) -> Tensor:
    """Returns [4, S]: how much of a sequence is in each quarter of N. Those of one length are divided evenly."""
    first_S, last_S = (
        torch.searchsorted(sorted_N, lengths_S, right=right).double() * 4 / max(sorted_N.numel(), 1) for right in (False, True)
    )
    start_Q1 = torch.arange(4, device=lengths_S.device)[:, None]
    inside_QS = (torch.minimum(last_S, start_Q1 + 1) - torch.maximum(first_S, start_Q1)).clamp(min=0)
    return inside_QS / (last_S - first_S).clamp(min=1e-9)


@torch.no_grad()
def _measure_clip(
    config: ObjectiveConfig, context: StepContext, values: TokenValues, gain: Surrogate
) -> dict[str, tuple[Tensor, Tensor]]:
    """Shares are of tokens with an advantage. ``ratio/sigma`` is the mean of (Σ_t δ)² / T_i; the row has its root."""
    mask_T, index_T, lengths_S = values.mask_T, values.index_T, values.lengths_S
    square_S = sequence_sum(values.delta_T, index_T, lengths_S.numel()) ** 2 / lengths_S.clamp(min=1)
    metrics = {"ratio/sigma": ((square_S * lengths_S).sum(), lengths_S.sum())}
    if gain.clipped_low_T is not None and gain.clipped_high_T is not None:
        clipped_T = gain.clipped_low_T | gain.clipped_high_T
        pushed_T = mask_T & (values.advantage_T != 0)
        pushed_S, clipped_S = (
            sequence_sum(where_T.double(), index_T, lengths_S.numel()) for where_T in (pushed_T, pushed_T & clipped_T)
        )
        inside_QS = _quarters(lengths_S, context.pushed_lengths)
        quarters = zip((inside_QS * clipped_S).sum(1), (inside_QS * pushed_S).sum(1), strict=True)
        metrics["clip/share"] = (clipped_S.sum(), pushed_S.sum())
        metrics |= zip(("clip/share_q1", "clip/share_q2", "clip/share_q3", "clip/share_q4"), quarters, strict=True)
    if isinstance(config.trust_region, Clip) and config.trust_region.is_auto:
        tokens, clip_range = mask_T.sum().double(), context.clip_range or ClipRange()
        low, high = config.trust_region.bounds(clip_range)
        metrics |= {
            "clip/bound_low": (low * tokens, tokens),
            "clip/bound_high": (high * tokens, tokens),
            "clip/slope_low": (clip_range.low_slope * tokens, tokens),
            "clip/slope_high": (clip_range.high_slope * tokens, tokens),
            "clip/length": (2**clip_range.log2_length * tokens, tokens),
        }
    return metrics


@torch.no_grad()
def _count_moves(config: ObjectiveConfig, values: TokenValues, bounded: Bounded) -> Tensor | None:
    """Returns [2, 3, BINS]: moves towards the lower bound where A < 0, the upper where A > 0, in the bounds' unit."""
    if not isinstance(config.trust_region, Clip):
        return None
    if bounded.units is None:
        low_T = high_T = torch.expm1(bounded.log_T)
    else:
        low_T, high_T = (bounded.log_T / unit_T for unit_T in bounded.units)
    falling_T, rising_T = (values.mask_T & (values.advantage_T * sign > 0) for sign in (-1, 1))
    log2_T = bounded.log2_length_T
    return torch.stack([count_moves(-low_T, falling_T, log2_T), count_moves(high_T, rising_T, log2_T)])
