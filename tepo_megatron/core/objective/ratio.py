"""Ratios π_θ / π_old and π_old / π_sampler. δ = log π_θ − log π_old."""

import torch
from torch import Tensor

from tepo_megatron.config.objective.choices import BuiltinRatio, Ratio
from tepo_megatron.config.objective.custom import OwnMismatch, OwnRatio
from tepo_megatron.config.objective.terms import Level, Mismatch
from tepo_megatron.core.objective.values import TokenValues, check_custom


def sequence_sum(values_T: Tensor, sequence_index_T: Tensor, num_sequences: int) -> Tensor:
    # A GPU adds in any order: in fp32 the ranks of a tensor-parallel group could differ by a bit, and so about what is clipped.
    dtype = torch.float64 if values_T.is_floating_point() else values_T.dtype
    sums_S = values_T.new_zeros(num_sequences, dtype=dtype).index_add(0, sequence_index_T, values_T.to(dtype))
    return sums_S.to(values_T.dtype)


def _prefix_sum(values_T: Tensor, sequence_index_T: Tensor) -> Tensor:
    values_T = values_T.double()
    sums_T = values_T.cumsum(0)
    first_T = torch.arange(sequence_index_T.numel(), device=sequence_index_T.device)
    first_T[1:] *= sequence_index_T[1:] != sequence_index_T[:-1]
    return sums_T - (sums_T - values_T)[first_T.cummax(0).values]


def length_factor(ratio: Ratio, values: TokenValues) -> Tensor:
    """Returns a log-ratio's spread relative to an independent token's: √n for a product of n ratios, 1/√n for a mean."""
    lengths_S = values.lengths_S
    if isinstance(ratio, OwnRatio) or ratio.kind == "token":
        return torch.ones_like(values.mask_T, dtype=lengths_S.dtype)
    by_prefix = ratio.kind == "prefix"
    count_T = _prefix_sum(values.mask_T, values.index_T).to(lengths_S.dtype) if by_prefix else lengths_S[values.index_T]
    root_T = count_T.clamp(min=1).sqrt()
    return 1 / root_T if ratio.kind == "power_mean" or ratio.length_normalized else root_T


def over_sequence(values_T: Tensor, level: Level, values: TokenValues) -> Tensor:
    """``token`` changes nothing, ``sequence`` sums, ``geometric`` averages."""
    if level == "token":
        return values_T
    sums_S = sequence_sum(values_T, values.index_T, values.lengths_S.numel())
    return (sums_S if level == "sequence" else sums_S / values.lengths_S.clamp(min=1))[values.index_T]


def policy_log_ratio(ratio: BuiltinRatio, delta_T: Tensor, values: TokenValues) -> Tensor:
    """``delta_T``: δ, 0 outside the mask, perhaps bounded.

    ``sequence``: log s_i = Σ_t δ_it / T_i (equation 3), or Σ_t δ_it un-normalised. ``sequence_token``: sg[log s_i] + δ_it −
    sg[δ_it] (equation 4); ``prefix``: the same up to t. ``power_mean``: log (Σ_t exp(p δ_it) / T_i)^(1/p).
    """
    if ratio.kind == "token":
        return delta_T
    if ratio.kind == "power_mean":
        return _log_power_mean(ratio.p, delta_T, values)
    if ratio.kind == "prefix":
        sums_T = _prefix_sum(delta_T.detach(), values.index_T)
        counts_T = _prefix_sum(values.mask_T, values.index_T).clamp(min=1)
        log_prefix_T = sums_T / counts_T if ratio.length_normalized else sums_T
        return torch.where(values.mask_T, log_prefix_T.to(delta_T.dtype), 0.0) + (delta_T - delta_T.detach())
    log_ratio_T = over_sequence(delta_T, "geometric" if ratio.length_normalized else "sequence", values)
    if ratio.kind == "sequence_token":
        # the bracket is 0 in value and 1 in gradient: log s_i for the value, the token's own δ for the gradient
        log_ratio_T = log_ratio_T.detach() + (delta_T - delta_T.detach())
    return log_ratio_T


def _log_power_mean(p: float, delta_T: Tensor, values: TokenValues) -> Tensor:
    """Dividing by the geometric mean is exact near p = 0. fp32 would overflow in exp(p δ)."""
    mean_T = over_sequence(delta_T, "geometric", values)
    if abs(p) < 1e-100:  # 1 / p overflows in the gradient, and p changes no digit
        return mean_T
    # differences outside the mask are made 0 beforehand, so that they add nothing: expm1(0) = 0
    apart_T = torch.where(values.mask_T, (delta_T - mean_T).double(), 0.0)
    excess_T = over_sequence(torch.expm1((p * apart_T).clamp(max=700)), "geometric", values)  # 709 overflows fp64
    return mean_T + (torch.log1p(excess_T) / p).to(delta_T.dtype)


def sampler_weights(correction: Mismatch, values: TokenValues) -> Tensor:
    """Returns π_old / π_sampler, at most ``cap`` or 0 outside [low, high]."""
    if isinstance(correction, OwnMismatch):
        weights_T = correction.importance_weights(values)
        return check_custom(correction, weights_T, "importance_weights", values.delta_T).detach()
    weight_T = over_sequence(values.mismatch_T.detach(), correction.level, values).exp()
    if correction.kind == "truncate":
        return weight_T.clamp(max=correction.cap)
    # 0 and not the nearer bound: a token whose two probabilities differ that much is taken for wrong, and does not count
    inside_T = (weight_T >= correction.low) & (weight_T <= correction.high)
    return torch.where(inside_T, weight_T, 0.0)
