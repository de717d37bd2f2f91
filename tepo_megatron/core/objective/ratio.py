"""Ratios π_θ / π_old and π_old / π_sampler (docs/reference/tepo.md). δ = log π_θ − log π_old, 0 outside the loss mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tepo_megatron.config.objective.custom import OwnMismatch
from tepo_megatron.core.objective.custom import custom_weights

if TYPE_CHECKING:
    from tepo_megatron.config.objective.choices import BuiltinRatio
    from tepo_megatron.config.objective.terms import Level, MaskOutside, Mismatch, Truncate
    from tepo_megatron.core.objective.values import TokenValues


def sequence_sum(values_T: Tensor, sequence_index_T: Tensor, num_sequences: int) -> Tensor:
    """Sums [T] over whole sequences to [S], differentiable."""
    return values_T.new_zeros(num_sequences).index_add(0, sequence_index_T, values_T)


def over_sequence(
    values_T: Tensor,
    level: Literal["sequence", "geometric"],
    index_T: Tensor,
    lengths_S: Tensor,
) -> Tensor:
    """Returns the sum (``sequence``) or mean (``geometric``) of each sequence at each of its tokens: [T]."""
    sums_S = sequence_sum(values_T, index_T, lengths_S.numel())
    return (sums_S if level == "sequence" else sums_S / lengths_S.clamp(min=1))[index_T]


def policy_log_ratio(ratio: BuiltinRatio, delta_T: Tensor, mask_T: Tensor, lengths_S: Tensor, index_T: Tensor) -> Tensor:
    """Returns the log-ratio at every token, [T], differentiable in ``delta_T``.

    - ``token``: δ_it.
    - ``sequence``: log s_i = Σ_t δ_it / T_i (equation 3), or Σ_t δ_it un-normalised.
    - ``sequence_token``: sg[log s_i] + δ_it − sg[δ_it] (equation 4).
    - ``power_mean``: log (Σ_t exp(p δ_it) / T_i)^(1/p).
    """
    if ratio.kind == "token":
        return delta_T
    if ratio.kind == "power_mean":
        return log_power_mean(ratio.p, delta_T, mask_T, lengths_S, index_T)
    level: Literal["sequence", "geometric"] = "geometric" if ratio.length_normalized else "sequence"
    log_ratio_T = over_sequence(delta_T, level, index_T, lengths_S)
    if ratio.kind == "sequence_token":
        # the bracket is 0 in value and 1 in gradient: log s_i for the value, the token's own δ for the gradient
        log_ratio_T = log_ratio_T.detach() + (delta_T - delta_T.detach())
    return log_ratio_T


def log_power_mean(p: float, delta_T: Tensor, mask_T: Tensor, lengths_S: Tensor, index_T: Tensor) -> Tensor:
    """Returns the log of the power mean of a sequence's token ratios, at each token (HölderPO).

    Ratios are first divided by their geometric mean, so that the logarithm is exact also near p = 0. fp64, since exp(p δ) of
    |p| ≤ 10 leaves fp32 at |δ| = 9.
    """
    mean_T = over_sequence(delta_T, "geometric", index_T, lengths_S)
    if p == 0:
        return mean_T
    # differences outside the mask are made 0 beforehand, so that they add nothing: expm1(0) = 0
    apart_T = torch.where(mask_T, (delta_T - mean_T).double(), 0.0)
    excess_T = over_sequence(torch.expm1(p * apart_T), "geometric", index_T, lengths_S.double())
    return mean_T + (torch.log1p(excess_T) / p).to(delta_T.dtype)


def sampler_weights(correction: Mismatch, values: TokenValues) -> Tensor:
    if isinstance(correction, OwnMismatch):
        return custom_weights(correction, values)
    return mismatch_weights(correction, values.mismatch_T, values.index_T, values.lengths_S)


def mismatch_weights(correction: Truncate | MaskOutside, difference_T: Tensor, index_T: Tensor, lengths_S: Tensor) -> Tensor:
    """Returns π_old / π_sampler [T], at most ``cap`` (truncated importance sampling) or 0 outside [low, high] (IcePop).

    ``difference_T`` is log π_old − log π_sampler.
    """
    weight_T = log_weights(correction.level, difference_T, index_T, lengths_S).exp()
    if correction.kind == "truncate":
        return weight_T.clamp(max=correction.cap)
    # 0 and not the nearer bound: a token whose two probabilities differ that much is taken for wrong, and does not count
    inside_T = (weight_T >= correction.low) & (weight_T <= correction.high)
    return torch.where(inside_T, weight_T, 0.0)


def log_weights(level: Level, difference_T: Tensor, index_T: Tensor, lengths_S: Tensor) -> Tensor:
    """Returns the token's own log-weight, or the sum or mean over its sequence; detached."""
    difference_T = difference_T.detach()
    return difference_T if level == "token" else over_sequence(difference_T, level, index_T, lengths_S)


def effective_sample_share(difference_T: Tensor) -> Tensor:
    """Returns (Σw)² / (N Σw²), w = π_old / π_sampler over N tokens; 1 for N = 0."""
    if not difference_T.numel():
        return difference_T.new_ones(())
    weight_T = (difference_T.double() - difference_T.double().max()).exp()  # the share does not change with the scale
    return (weight_T.sum() ** 2 / (weight_T.numel() * (weight_T**2).sum())).to(difference_T.dtype)
