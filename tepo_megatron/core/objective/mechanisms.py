"""Terms that penalise chosen tokens, or drop their gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tepo_megatron.config.objective.choices import ClipCov, TrustRegion
from tepo_megatron.config.objective.custom import OwnMask, OwnPenalty
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.config.objective.terms import KL, Distill, KLCov, KLMask, OffPolicySequenceMask, Rejection, SecondMomentMask
from tepo_megatron.core.objective.ratio import over_sequence
from tepo_megatron.core.objective.values import LARGEST, StepValues, TokenValues, check_custom


class _Mechanism(NamedTuple):
    choose: Callable[[TokenValues], Tensor | None]
    """Returns bool [T], independent of micro-batches and ranks; ``None``: every response token."""
    penalty: Callable[[TokenValues], Tensor] | None = None
    """Returns [T], differentiable, also finite at other tokens."""
    detaches: bool = False
    """Chosen tokens keep the surrogate's value, without its gradient."""
    of_old: bool = False
    """The penalty is an estimate under π_old, so that weights for another sampler apply."""


def kl_estimate(difference_T: Tensor, estimator: Literal["k1", "k2", "k3", "abs"]) -> Tensor:
    """``difference_T``: d = log π_θ − log q. k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d, abs = |d|."""
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return difference_T**2 / 2
    if estimator == "k3":  # expm1: at a small d, exp(−d) − 1 in fp32 would lose most of its digits
        difference_T = difference_T.clamp(min=-LARGEST)
        return torch.expm1(-difference_T) + difference_T
    return difference_T.abs()


def _kl_penalty(term: KL | KLCov | KLMask, values: TokenValues) -> Tensor:
    """``importance``: tokens are drawn from π_old, so exp(δ) has a gradient (docs/reference/tepo.md, equation 8)."""
    by_name = {"old": values.delta_T, "reference": values.reference_delta_T, "teacher": values.teacher_delta_T}
    difference_T = by_name[term.against]
    assert difference_T is not None
    value_T = kl_estimate(difference_T, term.estimator)
    if term.weight == "importance":
        ratio_T = values.importance_T
        if term.estimator == "k3":  # beyond its bound it has no gradient that would cancel the ratio's
            ratio_T = torch.where(difference_T < -LARGEST, ratio_T.detach(), ratio_T)
        value_T = value_T * ratio_T
    return term.coefficient * value_T


def _kl(term: KL, _: StepValues) -> _Mechanism:
    return _Mechanism(lambda values: None, partial(_kl_penalty, term), of_old=term.weight == "importance")


def _distill(term: Distill, step: StepValues) -> _Mechanism:
    if term.of == "sampled":
        return _kl(KL(coefficient=term.coefficient, **_SAMPLED), step)

    def penalty(values: TokenValues) -> Tensor:
        if values.divergence_T is None:
            raise ValueError(
                f"objective.distill.of = {term.of!r} needs scores.divergence; score with the teacher's logits, or its top k"
            )
        return term.coefficient * values.divergence_T

    return _Mechanism(lambda values: None, penalty)


_SAMPLED: Mapping[str, Any] = {"against": "teacher", "estimator": "k3", "weight": "importance"}


def _kl_cov(term: KLCov, step: StepValues) -> _Mechanism:
    highest_R = step.covariance_R.topk(_token_count(term.fraction, step.covariance_R)).values
    threshold = highest_R[-1]
    # Log-probs of 0 tie in thousands. Of those that tie, labels are drawn until the fraction is full.
    tickets_R = _tickets(step.old_logprob_R, step.advantage_R, step.labels_R)[step.covariance_R == threshold]
    last = int(tickets_R.sort().values[int((highest_R == threshold).sum()) - 1])

    def choose(values: TokenValues) -> Tensor:
        tickets_T = _tickets(values.old_logprob_T, values.advantage_T, values.labels_T)
        drawn_T = (values.covariance_T == threshold) & (tickets_T <= last)
        return ((values.covariance_T > threshold) | drawn_T) & (values.covariance_T > 0)

    return _Mechanism(choose, partial(_kl_penalty, term))


def _kl_mask(term: KLMask, step: StepValues) -> _Mechanism:
    """Penalises A > 0 with falling entropy (docs/reference/tepo.md, equations 6, 7)."""
    noise = step.entropy_noise
    return _Mechanism(lambda values: (values.advantage_T > 0) & entropy_falls(term, noise, values), partial(_kl_penalty, term))


def entropy_falls(term: KLMask, noise: float, values: TokenValues) -> Tensor:
    """Returns bool [T]. A measured fall counts above the tolerance, ``auto``: the noise (nats), above fp32 rounding."""
    if term.falling == "covariance":
        return values.covariance_T > 0
    if term.falling == "first_order":
        if values.entropy_slope_T is None:
            raise ValueError(
                "objective.kl_mask.falling = 'first_order' needs scores.entropy_slope; score with logprob_and_entropy(..., "
                "entropy_slope=True), as objective.needs_entropy_slope says"
            )
        return values.advantage_T * values.entropy_slope_T < 0
    if values.entropy_change_T is None:
        raise ValueError("objective.kl_mask.falling = 'measured' needs old_entropy_T; score the batch before the step")
    return values.entropy_change_T < -(max(1e-5, noise) if term.tolerance == "auto" else term.tolerance)


def _clip_cov(region: TrustRegion, step: StepValues) -> _Mechanism | None:
    if not isinstance(region, ClipCov):
        return None

    def is_candidate(covariance: Tensor) -> Tensor:
        return (covariance >= region.cov_low) & (covariance <= region.cov_high)

    tickets_R = _tickets(step.old_logprob_R, step.advantage_R, step.labels_R)[is_candidate(step.covariance_R)]
    drawn = tickets_R.sort().values[: _token_count(region.fraction, step.covariance_R)]
    highest = int(drawn[-1]) if drawn.numel() else -1

    def choose(values: TokenValues) -> Tensor:
        tickets_T = _tickets(values.old_logprob_T, values.advantage_T, values.labels_T)
        return is_candidate(values.covariance_T) & (tickets_T <= highest)

    return _Mechanism(choose, detaches=True)


def _token_count(fraction: float, of: Tensor) -> int:
    return min(max(int(fraction * of.numel()), 1), of.numel())


def _tickets(logprob_T: Tensor, advantage_T: Tensor, labels_T: Tensor) -> Tensor:
    """Hashes to int64 in [0, 2³²): draws do not depend on order, micro-batches, ranks or a resume."""
    hashed_T = torch.zeros_like(labels_T)
    for part_T in (labels_T, logprob_T.float().view(torch.int32).long(), advantage_T.float().view(torch.int32).long()):
        hashed_T = (hashed_T ^ part_T) & 0xFFFFFFFF
        # Shift, exclusive-or and multiply, twice: each bit of the input comes to change about half of the bits of the hash.
        for shift, factor in ((16, 0x45D9F3B), (15, 0x119DE1F3)):  # below 2³¹, so that products stay within int64
            hashed_T = ((hashed_T ^ (hashed_T >> shift)) * factor) & 0xFFFFFFFF
        hashed_T = hashed_T ^ (hashed_T >> 16)
    return hashed_T


def _rejection(term: Rejection, _: StepValues) -> _Mechanism:
    # compared as logarithms, since a product over many tokens overflows
    lowest, highest = math.log(term.low) if term.low > 0 else -math.inf, math.log(term.high)

    def choose(values: TokenValues) -> Tensor:
        log_T = over_sequence(values.mismatch_T.detach(), term.level, values)
        return (log_T < lowest) | (log_T > highest)

    return _Mechanism(choose, detaches=True)


def _opsm(term: OffPolicySequenceMask, _: StepValues) -> _Mechanism:

    def choose(values: TokenValues) -> Tensor:
        fall_T = -over_sequence(values.delta_T.detach(), "geometric", values)
        return (values.advantage_T < 0) & (fall_T > term.delta)

    return _Mechanism(choose, detaches=True)


def _m2po(term: SecondMomentMask, step: StepValues) -> _Mechanism:
    """Chooses the fewest largest squares without which the mean reaches the threshold."""
    ordered_R = (step.mismatch_R**2).sort().values
    means_R = ordered_R.double().cumsum(0) / torch.arange(1, ordered_R.numel() + 1, device=ordered_R.device)
    over_R = means_R > term.threshold  # means of ever larger values only grow, so this is a tail
    bound = ordered_R[over_R][0] if over_R.any() else ordered_R.new_tensor(torch.inf)
    return _Mechanism(lambda values: values.mismatch_T**2 >= bound, detaches=True)


def _custom_mask(mask: OwnMask, step: StepValues) -> _Mechanism:
    prepared = mask.prepare(step)
    return _Mechanism(lambda values: check_custom(mask, mask.choose(values, prepared), "choose", values.mask_T), detaches=True)


def _custom_penalty(term: OwnPenalty, step: StepValues) -> _Mechanism:
    prepared = term.prepare(step)

    def choose(values: TokenValues) -> Tensor | None:
        chosen = term.choose(values, prepared)
        return None if chosen is None else check_custom(term, chosen, "choose", values.mask_T)

    return _Mechanism(choose, lambda values: check_custom(term, term.penalty(values, prepared), "penalty", values.delta_T))


MECHANISMS: Mapping[str, Callable[[Any, StepValues], _Mechanism | None]] = {
    "kl_mask": _kl_mask,
    "kl": _kl,
    "kl_cov": _kl_cov,
    "trust_region": _clip_cov,
    "rejection": _rejection,
    "opsm": _opsm,
    "m2po": _m2po,
    "mask": _custom_mask,
    "penalty": _custom_penalty,
    "distill": _distill,
}
"""By field of the objective, whose section is the argument; no collective. Penalties add in this order: append new ones."""


class Mechanisms(tuple[_Mechanism, ...]):
    """Those of an objective, ready for the micro-batches of a step."""

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> Mechanisms:
        made = (make(section, step) for name, make in MECHANISMS.items() if (section := getattr(config, name)) is not None)
        return cls(mechanism for mechanism in made if mechanism is not None)

    def choose(self, values: TokenValues) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Returns the tokens of each mechanism, all chosen ones, and those without gradient (bool [T])."""
        choices: list[Tensor] = []
        chosen_T, detached_T = torch.zeros_like(values.mask_T), None
        for mechanism in self:
            choice_T = mechanism.choose(values)
            where_T = values.mask_T if choice_T is None else choice_T & values.mask_T
            choices.append(where_T)
            if choice_T is not None:
                chosen_T = chosen_T | where_T
            if mechanism.detaches:
                detached_T = where_T if detached_T is None else detached_T | where_T
        return choices, chosen_T, detached_T

    def penalty(self, values: TokenValues, choices: list[Tensor], weight_T: Tensor | None) -> Tensor:
        """Returns the sum of all penalties. ``weight_T``: of ``objective.mismatch``."""
        penalty_T = torch.zeros_like(values.delta_T)
        for mechanism, where_T in zip(self, choices, strict=True):
            if mechanism.penalty is not None:
                value_T = mechanism.penalty(values)
                if mechanism.of_old and weight_T is not None:
                    value_T = weight_T * value_T
                penalty_T = penalty_T + torch.where(where_T, value_T, 0.0)
        return penalty_T
