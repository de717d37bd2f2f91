"""Trust regions (docs/reference/tepo.md)."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tepo_megatron.config.objective.choices import CLIPPED_SHARE, Clip, ClipRange, TrustRegion
from tepo_megatron.config.objective.custom import OwnRatio, OwnTrustRegion
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.ratio import length_factor, policy_log_ratio
from tepo_megatron.core.objective.values import LARGEST, TokenValues, check_custom
from tepo_megatron.core.types import LENGTH_UNIT, bound_for_share, sums_outside


class Surrogate(NamedTuple):
    """What is maximised, and where a bound removed the ratio's gradient (bool); None: not measured."""

    value_T: Tensor
    clipped_low_T: Tensor | None = None
    clipped_high_T: Tensor | None = None


def _clipped(
    ratio_T: Tensor, advantage_T: Tensor, least: float | Tensor, most: float | Tensor, dual: float | None = None
) -> Surrogate:
    """min(r A, clip(r, least, most) A); with ``dual`` at least dual · A if A < 0."""
    # The minimum makes the clip one-sided: it holds only where the ratio has moved the way that the advantage asks for.
    value_T = torch.minimum(ratio_T * advantage_T, ratio_T.clamp(least, most) * advantage_T)  # type: ignore[arg-type]
    above_T = (ratio_T > most) & (advantage_T > 0)
    if dual is not None:
        # where A < 0 the minimum has no bound: a ratio of 100 would count a hundredfold
        negative_T = advantage_T < 0
        above_T = above_T | (negative_T & (ratio_T > dual))
        value_T = torch.where(negative_T, torch.maximum(value_T, dual * advantage_T.to(ratio_T.dtype)), value_T)
    return Surrogate(value_T, (ratio_T < least) & (advantage_T < 0), above_T)


def _binary_kl(from_logprob_T: Tensor, to_logprob_T: Tensor) -> Tensor:
    """KL of (q, 1 − q) from (p, 1 − p); finite also if rounding gives p ≥ 1."""
    tiny = torch.finfo(from_logprob_T.dtype).eps
    rest_from_T, rest_to_T = (-torch.expm1(logprob_T).clamp(max=-tiny) for logprob_T in (from_logprob_T, to_logprob_T))
    within_T = from_logprob_T.exp() * (from_logprob_T - to_logprob_T)
    return within_T + rest_from_T * (rest_from_T.log() - rest_to_T.log())


class Bounded(NamedTuple):
    """The ratio, its logarithm, and where its own bound removed the gradient.

    For a clip by length: log₂ of the tokens that it goes by, and the two bounds in units of c.
    """

    ratio_T: Tensor
    log_T: Tensor
    low_T: Tensor
    high_T: Tensor
    log2_length_T: Tensor | None = None
    units: tuple[Tensor, Tensor] | None = None
    clip_range: ClipRange | None = None


def bounded_ratio(config: ObjectiveConfig, values: TokenValues, clip_range: ClipRange | None) -> Bounded:
    """``clip_range``: of `next_clip_range`."""
    region, advantage_T = config.trust_region, values.advantage_T
    delta_T = values.delta_T
    low_T = high_T = torch.zeros_like(values.mask_T)
    if not isinstance(region, OwnTrustRegion) and region.kind == "log_clip":  # GMPO, arXiv 2507.20673
        high_T, low_T = (delta_T > region.high) & (advantage_T > 0), (delta_T < -region.low) & (advantage_T < 0)
        # in place of the bounded ones stand constants, which have no gradient
        delta_T = torch.where(high_T, region.high, torch.where(low_T, -region.low, delta_T))
    if isinstance(config.ratio, OwnRatio):
        raw_T = config.ratio.log_ratio(replace(values, delta_T=delta_T))
        log_T = torch.where(values.mask_T, check_custom(config.ratio, raw_T, "log_ratio", delta_T), 0.0)
    else:
        log_T = policy_log_ratio(config.ratio, delta_T, values)
    if not isinstance(region, OwnTrustRegion) and region.kind == "length_clip":  # FSPO, arXiv 2509.09177
        # before exp: the product of many ratios overflows, and a bound on an infinite ratio has no finite gradient
        most_T = region.width * values.lengths_S[values.index_T].sqrt()
        low_T, high_T = log_T < -most_T, log_T > most_T
        log_T = log_T.clamp(-most_T, most_T)
    bounded = Bounded(log_T.clamp(max=LARGEST).exp(), log_T, low_T, high_T, clip_range=clip_range)
    if isinstance(region, Clip) and region.scale == "length":
        factor_T = length_factor(config.ratio, values)
        log2_T = 2 * factor_T.double().log2().abs()
        bounded = bounded._replace(log2_length_T=log2_T, units=_bound_units(factor_T, log2_T, clip_range))
    return bounded


def _bound_units(factor_T: Tensor, log2_T: Tensor, clip_range: ClipRange | None) -> tuple[Tensor, Tensor]:
    if clip_range is None or not (clip_range.low_slope or clip_range.high_slope):
        return factor_T, factor_T
    excess_T = log2_T - clip_range.log2_length
    low_T, high_T = ((slope * excess_T).exp2().to(factor_T.dtype) for slope in (clip_range.low_slope, clip_range.high_slope))
    return factor_T * low_T, factor_T * high_T


def surrogate(config: ObjectiveConfig, bounded: Bounded, values: TokenValues) -> Surrogate:
    region, ratio_T = config.trust_region, bounded.ratio_T
    if isinstance(region, OwnTrustRegion):
        return _custom_surrogate(region, ratio_T, values)
    logprob_T, advantage_T = values.logprob_T, values.advantage_T
    if region.kind == "clip_weight":  # every token keeps its gradient
        raw_T = ratio_T.detach()
        weight_T = raw_T.clamp(None if region.low is None else 1 - region.low, 1 + region.high)
        return Surrogate(weight_T * advantage_T * logprob_T, raw_T < weight_T, raw_T > weight_T)
    if region.kind == "soft_gate":
        tau_T = torch.full_like(ratio_T, region.tau_negative).masked_fill(advantage_T > 0, region.tau_positive)
        never_T = torch.zeros_like(values.mask_T)
        return Surrogate(4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1)) * advantage_T, never_T, never_T)
    if region.kind == "divergence":
        with torch.no_grad():
            moved_T = logprob_T.exp() - values.old_logprob_T.exp()
            apart_T = moved_T.abs() if region.measure == "tv" else _binary_kl(values.old_logprob_T, logprob_T)
            far_T = apart_T > region.threshold
            high_T, low_T = far_T & (moved_T > 0) & (advantage_T > 0), far_T & (moved_T < 0) & (advantage_T < 0)
        value_T = ratio_T.detach().clamp(max=region.cap) * advantage_T * logprob_T
        return Surrogate(torch.where(high_T | low_T, 0.0, value_T), low_T, high_T)
    if region.kind == "clip_cov":
        return _clipped(ratio_T, advantage_T, 1 - region.low, 1 + region.high)
    if region.kind == "clip":
        low, high = region.bounds(bounded.clip_range)
        if region.scale == "fixed":
            return _clipped(ratio_T, advantage_T, 1 - low, 1 + high, region.dual)
        assert bounded.units is not None
        low_T, high_T = bounded.units
        return _clipped(ratio_T, advantage_T, (-low * low_T).exp(), (high * high_T).exp(), region.dual)
    return Surrogate(ratio_T * advantage_T, bounded.low_T, bounded.high_T)


def _custom_surrogate(region: OwnTrustRegion, ratio_T: Tensor, values: TokenValues) -> Surrogate:
    raw = region.surrogate(ratio_T, values)
    whole = raw if isinstance(raw, Surrogate) else Surrogate(raw)
    value_T = torch.where(values.mask_T, check_custom(region, whole.value_T, "surrogate", values.delta_T), 0.0)
    low_T, high_T = (None if mark_T is None else mark_T & values.mask_T for mark_T in whole[1:])
    return Surrogate(value_T, low_T, high_T)


_GAIN, _MOST = 0.25, 2.5  # of a bound's logarithm
_SLOPE_GAIN, _STEEPEST, _LEAST_SPREAD = 0.1, 2.0, 0.25  # the spread is of log₂ n


def next_clip_range(region: TrustRegion, moves: Tensor, current: ClipRange | None) -> ClipRange | None:
    """Returns the range for ``auto`` bounds; None if there are none. A side that has not moved yet has None.

    ``moves``: `ObjectiveOutput.moves`, summed over a step. The first step gives its quantiles. A later one multiplies a bound
    by exp(_GAIN (share outside / wanted - 1)), so that the mean share of a run is the wanted one, and turns it about the mean
    length, to even out the lengths. A side without a spread keeps ``current``.
    """
    if not isinstance(region, Clip) or not region.is_auto:
        return None
    share, current = region.share or CLIPPED_SHARE, current or ClipRange()
    tokens, lengths, _ = moves.double().sum((0, 2)).tolist()
    length = lengths * LENGTH_UNIT / tokens if tokens else current.log2_length
    low, low_slope = _next_bound(moves[0], current.low, current.low_slope, share, current.log2_length, length)
    high, high_slope = _next_bound(moves[1], current.high, current.high_slope, share, current.log2_length, length)
    return region.of_auto_sides(ClipRange(low, high, low_slope, high_slope, length))


def _next_bound(
    counts: Tensor, c: float | None, slope: float, share: float, log2_before: float, log2_length: float
) -> tuple[float | None, float]:
    """Returns c at the length 2^log2_length, and the slope. ``c``: at 2^log2_before."""
    quantile = bound_for_share(counts, share)
    if not c:
        return quantile, 0.0
    change, line, mean = 0.0, 0.0, log2_length
    if quantile is not None:
        tokens, total, squares = counts.double().sum(1).tolist()
        outside, total_outside = (sums_outside(counts[:2], c) / (tokens * share)).tolist()
        mean = total * LENGTH_UNIT / tokens
        spread = squares * LENGTH_UNIT**2 / tokens - mean**2 + _LEAST_SPREAD**2
        change = min(_GAIN * (outside - 1), _MOST)
        # the least-squares line of (share outside / wanted) by ln n
        line = (total_outside * LENGTH_UNIT - outside * mean) / spread / math.log(2)
    turn = min(max(_SLOPE_GAIN * line, -_SLOPE_GAIN), _SLOPE_GAIN)
    turned = min(max(slope + turn, -_STEEPEST), _STEEPEST)
    # log₂ of what the old line has there, and of what its turn about the mean adds
    moved = slope * (log2_length - log2_before) + (turned - slope) * (log2_length - mean)
    return c * math.exp(change + moved * math.log(2)), turned
