"""Ratios π_θ / π_old and π_old / π_sampler. δ = log π_θ − log π_old."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tepo_megatron.config.objective.custom import OwnMismatch, OwnRatio
from tepo_megatron.core.objective.values import check_custom

if TYPE_CHECKING:
    from tepo_megatron.config.objective.choices import BuiltinRatio, Ratio
    from tepo_megatron.config.objective.terms import Level, MaskOutside, Mismatch, Truncate
    from tepo_megatron.core.objective.values import TokenValues


def sequence_sum(values_T: Tensor, sequence_index_T: Tensor, num_sequences: int) -> Tensor:
    return values_T.new_zeros(num_sequences).index_add(0, sequence_index_T, values_T)


def prefix_sum(values_T: Tensor, sequence_index_T: Tensor) -> Tensor:
    """Returns fp64 sums over a sequence's tokens up to this one."""
    values_T = values_T.double()
    sums_T = values_T.cumsum(0)
    is_first_T = torch.ones_like(sequence_index_T, dtype=torch.bool)
    is_first_T[1:] = sequence_index_T[1:] != sequence_index_T[:-1]
    before_S = (sums_T - values_T)[is_first_T]
    return sums_T - before_S[is_first_T.cumsum(0) - 1]


def length_factor(ratio: Ratio, mask_T: Tensor, lengths_S: Tensor, index_T: Tensor) -> Tensor:
    """Returns the factor by which a log-ratio's spread differs from a token's, were tokens independent: √n of a product of n
    ratios, 1/√n of a mean.
    """
    if isinstance(ratio, OwnRatio) or ratio.kind == "token":
        return torch.ones_like(mask_T, dtype=lengths_S.dtype)
    count_T = prefix_sum(mask_T, index_T).to(lengths_S.dtype) if ratio.kind == "prefix" else lengths_S[index_T]
    root_T = count_T.clamp(min=1).sqrt()
    return 1 / root_T if ratio.kind == "power_mean" or ratio.length_normalized else root_T


def over_sequence(
    values_T: Tensor,
    level: Literal["sequence", "geometric"],
    index_T: Tensor,
    lengths_S: Tensor,
) -> Tensor:
    """``sequence`` sums, ``geometric`` averages."""
    sums_S = sequence_sum(values_T, index_T, lengths_S.numel())
    return (sums_S if level == "sequence" else sums_S / lengths_S.clamp(min=1))[index_T]


def policy_log_ratio(ratio: BuiltinRatio, delta_T: Tensor, mask_T: Tensor, lengths_S: Tensor, index_T: Tensor) -> Tensor:
    """``sequence``: log s_i = Σ_t δ_it / T_i (equation 3), or Σ_t δ_it un-normalised.

    ``sequence_token``: sg[log s_i] + δ_it − sg[δ_it] (equation 4); ``prefix``: the same with the sum up to t.
    ``power_mean``: log (Σ_t exp(p δ_it) / T_i)^(1/p).
    """
    if ratio.kind == "token":
        return delta_T
    if ratio.kind == "power_mean":
        return log_power_mean(ratio.p, delta_T, mask_T, lengths_S, index_T)
    if ratio.kind == "prefix":
        sums_T = prefix_sum(delta_T.detach(), index_T)
        log_prefix_T = sums_T / prefix_sum(mask_T, index_T).clamp(min=1) if ratio.length_normalized else sums_T
        return torch.where(mask_T, log_prefix_T.to(delta_T.dtype), 0.0) + (delta_T - delta_T.detach())
    level: Literal["sequence", "geometric"] = "geometric" if ratio.length_normalized else "sequence"
    log_ratio_T = over_sequence(delta_T, level, index_T, lengths_S)
    if ratio.kind == "sequence_token":
        # the bracket is 0 in value and 1 in gradient: log s_i for the value, the token's own δ for the gradient
        log_ratio_T = log_ratio_T.detach() + (delta_T - delta_T.detach())
    return log_ratio_T


def log_power_mean(p: float, delta_T: Tensor, mask_T: Tensor, lengths_S: Tensor, index_T: Tensor) -> Tensor:
    """Returns the log of the power mean of a sequence's token ratios (HölderPO).

    Dividing by the geometric mean keeps it exact near p = 0. fp32 would overflow in exp(p δ).
    """
    mean_T = over_sequence(delta_T, "geometric", index_T, lengths_S)
    if abs(p) < 1e-100:  # 1 / p overflows in the gradient, and p changes no digit
        return mean_T
    # differences outside the mask are made 0 beforehand, so that they add nothing: expm1(0) = 0
    apart_T = torch.where(mask_T, (delta_T - mean_T).double(), 0.0)
    excess_T = over_sequence(torch.expm1(p * apart_T), "geometric", index_T, lengths_S.double())
    return mean_T + (torch.log1p(excess_T) / p).to(delta_T.dtype)


def sampler_weights(correction: Mismatch, values: TokenValues) -> Tensor:
    if isinstance(correction, OwnMismatch):
        weights_T = correction.importance_weights(values)
        return check_custom(correction, weights_T, "importance_weights", values.delta_T).detach()
    return mismatch_weights(correction, values.mismatch_T, values.index_T, values.lengths_S)


def mismatch_weights(correction: Truncate | MaskOutside, difference_T: Tensor, index_T: Tensor, lengths_S: Tensor) -> Tensor:
    """Returns π_old / π_sampler, at most ``cap`` (truncated importance sampling) or 0 outside [low, high] (IcePop)."""
    weight_T = log_weights(correction.level, difference_T, index_T, lengths_S).exp()
    if correction.kind == "truncate":
        return weight_T.clamp(max=correction.cap)
    # 0 and not the nearer bound: a token whose two probabilities differ that much is taken for wrong, and does not count
    inside_T = (weight_T >= correction.low) & (weight_T <= correction.high)
    return torch.where(inside_T, weight_T, 0.0)


def log_weights(level: Level, difference_T: Tensor, index_T: Tensor, lengths_S: Tensor) -> Tensor:
    difference_T = difference_T.detach()
    return difference_T if level == "token" else over_sequence(difference_T, level, index_T, lengths_S)


def effective_sample_share(difference_T: Tensor) -> Tensor:
    """Returns (Σw)² / (N Σw²) with w = π_old / π_sampler; 1 for N = 0."""
    if not difference_T.numel():
        return difference_T.new_ones(())
    weight_T = (difference_T.double() - difference_T.double().max()).exp()  # the share does not change with the scale
    return (weight_T.sum() ** 2 / (weight_T.numel() * (weight_T**2).sum())).to(difference_T.dtype)
