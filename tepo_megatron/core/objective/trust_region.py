"""Trust regions of the ratio (docs/reference/tepo.md). All values are [T]."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tepo_megatron.config.objective.custom import OwnRatio, OwnTrustRegion
from tepo_megatron.core.objective.custom import check_token_values, custom_log_ratio
from tepo_megatron.core.objective.ratio import policy_log_ratio

if TYPE_CHECKING:
    from tepo_megatron.config.objective.choices import Divergence, TrustRegion
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.core.objective.values import TokenValues


class Surrogate(NamedTuple):
    """What is maximised at each token, and whether a bound was active."""

    value_T: Tensor
    clipped_low_T: Tensor
    """bool: the lower bound removed the ratio's gradient."""
    clipped_high_T: Tensor


def clipped(ratio_T: Tensor, advantage_T: Tensor, low: float, high: float, dual: float | None = None) -> Surrogate:
    """Computes min(r A, clip(r, 1 − low, 1 + high) A); with ``dual``, ≥ dual · A if A < 0."""
    # The minimum makes the clip one-sided: it holds only where the ratio has moved the way that the advantage asks for.
    value_T = torch.minimum(ratio_T * advantage_T, ratio_T.clamp(1 - low, 1 + high) * advantage_T)
    above_T = (ratio_T > 1 + high) & (advantage_T > 0)
    if dual is not None:
        # where A < 0 the minimum has no bound: a ratio of 100 would count a hundredfold
        negative_T = advantage_T < 0
        above_T = above_T | (negative_T & (ratio_T > dual))
        value_T = torch.where(negative_T, torch.maximum(value_T, dual * advantage_T), value_T)
    return Surrogate(value_T, (ratio_T < 1 - low) & (advantage_T < 0), above_T)


def weighted_logprob(ratio_T: Tensor, logprob_T: Tensor, advantage_T: Tensor, low: float | None, high: float) -> Surrogate:
    """Computes sg[clip(r)] · A · log π: no token loses its gradient (CISPO)."""
    ratio_T = ratio_T.detach()
    weight_T = ratio_T.clamp(None if low is None else 1 - low, 1 + high)
    return Surrogate(weight_T * advantage_T * logprob_T, ratio_T < weight_T, ratio_T > weight_T)


def soft_gated(ratio_T: Tensor, advantage_T: Tensor, tau_positive: float, tau_negative: float) -> Surrogate:
    """Computes 4/τ · σ(τ (r − 1)) · A, τ by the sign of A; no bound (SAPO, arXiv 2511.20347)."""
    tau_T = torch.where(advantage_T > 0, ratio_T.new_tensor(tau_positive), ratio_T.new_tensor(tau_negative))
    never_T = torch.zeros_like(advantage_T, dtype=torch.bool)
    return Surrogate(4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1)) * advantage_T, never_T, never_T)


def within_divergence(
    region: Divergence, ratio_T: Tensor, logprob_T: Tensor, old_logprob_T: Tensor, advantage_T: Tensor
) -> Surrogate:
    """Computes sg[min(r, cap)] · A · log π, 0 if the probability moved too far towards A (DPPO, arXiv 2602.04879).

    Too far: the divergence of (p, 1 − p) from (p_old, 1 − p_old) is above the threshold.
    """
    with torch.no_grad():
        moved_T = logprob_T.exp() - old_logprob_T.exp()
        apart_T = moved_T.abs() if region.measure == "tv" else binary_kl(old_logprob_T, logprob_T)
        far_T = apart_T > region.threshold
        high_T, low_T = far_T & (moved_T > 0) & (advantage_T > 0), far_T & (moved_T < 0) & (advantage_T < 0)
    value_T = ratio_T.detach().clamp(max=region.cap) * advantage_T * logprob_T
    return Surrogate(torch.where(high_T | low_T, 0.0, value_T), low_T, high_T)


def binary_kl(from_logprob_T: Tensor, to_logprob_T: Tensor) -> Tensor:
    """Computes the KL of (q, 1 − q) from (p, 1 − p), given as logarithms; finite also if rounding gives p ≥ 1."""
    tiny = torch.finfo(from_logprob_T.dtype).eps
    rest_from_T, rest_to_T = (-torch.expm1(logprob_T).clamp(max=-tiny) for logprob_T in (from_logprob_T, to_logprob_T))
    within_T = from_logprob_T.exp() * (from_logprob_T - to_logprob_T)
    return within_T + rest_from_T * (rest_from_T.log() - rest_to_T.log())


class _Bounded(NamedTuple):
    log_T: Tensor
    low_T: Tensor
    high_T: Tensor


def clip_logs(delta_T: Tensor, advantage_T: Tensor, low: float, high: float) -> _Bounded:
    """Computes min(δ, high) if A > 0, max(δ, −low) if A < 0, δ if A = 0 (GMPO, arXiv 2507.20673)."""
    high_T, low_T = (delta_T > high) & (advantage_T > 0), (delta_T < -low) & (advantage_T < 0)
    # in place of the bounded ones stand constants, which have no gradient
    return _Bounded(torch.where(high_T, high, torch.where(low_T, -low, delta_T)), low_T, high_T)


def clip_by_length(log_ratio_T: Tensor, lengths_T: Tensor, width: float) -> _Bounded:
    """Keeps the sequence's log-ratio within ±width · √T_i (FSPO, arXiv 2509.09177)."""
    most_T = width * lengths_T.sqrt()
    bounded_T = log_ratio_T.clamp(-most_T, most_T)
    return _Bounded(bounded_T, log_ratio_T < -most_T, log_ratio_T > most_T)


def bounded_ratio(config: ObjectiveConfig, values: TokenValues) -> tuple[Tensor, _Bounded]:
    """Bounds logarithms before (`clip_logs`) or after (`clip_by_length`) a sequence's ratio is formed."""
    region = None if isinstance(config.trust_region, OwnTrustRegion) else config.trust_region
    never_T = torch.zeros_like(values.mask_T)
    held = _Bounded(values.delta_T, never_T, never_T)
    if region is not None and region.kind == "log_clip":
        held = clip_logs(values.delta_T, values.advantage_T, region.low, region.high)
    if isinstance(config.ratio, OwnRatio):
        log_ratio_T = custom_log_ratio(config.ratio, values, held.log_T)
    else:
        log_ratio_T = policy_log_ratio(config.ratio, held.log_T, values.mask_T, values.lengths_S, values.index_T)
    held = held._replace(log_T=log_ratio_T)
    if region is not None and region.kind == "length_clip":
        # before exp: the product of many ratios overflows, and a bound on an infinite ratio has no finite gradient
        held = clip_by_length(log_ratio_T, values.lengths_S[values.index_T], region.width)
    return held.log_T.exp(), held


def surrogate(
    region: TrustRegion, ratio_T: Tensor, values: TokenValues, detached_T: Tensor | None, bounded: _Bounded
) -> Surrogate:
    """``detached_T`` (bool): tokens that lose their gradient, not their value."""
    if isinstance(region, OwnTrustRegion):
        return _custom_surrogate(region, ratio_T, values, detached_T)
    logprob_T, advantage_T = values.logprob_T, values.advantage_T
    if detached_T is not None:  # of both, since some regions send the gradient through the ratio, others through log π
        ratio_T = torch.where(detached_T, ratio_T.detach(), ratio_T)
        logprob_T = torch.where(detached_T, logprob_T.detach(), logprob_T)
    if region.kind == "clip_weight":
        return weighted_logprob(ratio_T, logprob_T, advantage_T, region.low, region.high)
    if region.kind == "soft_gate":
        return soft_gated(ratio_T, advantage_T, region.tau_positive, region.tau_negative)
    if region.kind == "divergence":
        return within_divergence(region, ratio_T, logprob_T, values.old_logprob_T, advantage_T)
    if region.kind == "clip" or region.kind == "clip_cov":
        return clipped(ratio_T, advantage_T, region.low, region.high, region.dual if region.kind == "clip" else None)
    return Surrogate(ratio_T * advantage_T, bounded.low_T, bounded.high_T)


def _custom_surrogate(region: OwnTrustRegion, ratio_T: Tensor, values: TokenValues, detached_T: Tensor | None) -> Surrogate:
    raw = region.surrogate(ratio_T, values)
    never_T = torch.zeros_like(values.mask_T)
    whole = raw if isinstance(raw, Surrogate) else Surrogate(raw, never_T, never_T)
    value_T = torch.where(values.mask_T, check_token_values(region, whole.value_T, "surrogate", values), 0.0)
    if detached_T is not None:
        value_T = torch.where(detached_T, value_T.detach(), value_T)
    return Surrogate(value_T, whole.clipped_low_T & values.mask_T, whole.clipped_high_T & values.mask_T)
