"""Advantages from rewards within groups (docs/reference/tepo.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def group_advantages(
    rewards_S: Tensor,
    groups_S: Tensor,
    *,
    kind: Literal["group", "no_std", "leave_one_out", "divide_by_mean"] = "group",
    std: Literal["sample", "population"] = "sample",
    eps: float = 1e-6,
) -> Tensor:
    """Returns fp32 [S] (fp64 for fp64 rewards), detached. ``groups_S``: int64 [S]; groups of equal rewards get exactly 0.

    ``group`` is (R − mean) / (std + eps) (equation 1); ``no_std`` R − mean (Dr.GRPO); ``leave_one_out`` R minus the others'
    mean (RLOO); ``divide_by_mean`` (R − mean) / mean (MaxRL). Raises ValueError for rewards that are not finite, or
    negative with ``divide_by_mean``.
    """
    if rewards_S.ndim != 1 or rewards_S.shape != groups_S.shape:
        raise ValueError(
            f"rewards_S has shape {tuple(rewards_S.shape)} and groups_S {tuple(groups_S.shape)}; give one of each per sequence"
        )
    finite_S = rewards_S.isfinite()
    if not finite_S.all():
        first = int((~finite_S).nonzero()[0])
        raise ValueError(f"the reward of sequence {first} is {rewards_S[first].item()}; rewards must be finite numbers")
    if kind == "divide_by_mean" and (rewards_S < 0).any():
        first = int((rewards_S < 0).nonzero()[0])
        raise ValueError(
            f"the reward of sequence {first} is {rewards_S[first].item():g}; objective.advantage.kind = 'divide_by_mean' "
            "divides by the group's mean, so rewards must not be negative; shift them, or choose another kind"
        )
    dtype = torch.promote_types(rewards_S.dtype, torch.float32)
    rewards_S = rewards_S.detach().double()
    _, group_S = torch.unique(groups_S, return_inverse=True)
    num_groups = int(group_S.max()) + 1 if group_S.numel() else 0
    zeros_G = rewards_S.new_zeros(num_groups)
    size_S = zeros_G.index_add(0, group_S, torch.ones_like(rewards_S))[group_S]
    centred_S = rewards_S - zeros_G.index_add(0, group_S, rewards_S)[group_S] / size_S
    if kind == "leave_one_out":
        # R − (ΣR − R) / (n − 1) = (R − ΣR / n) · n / (n − 1)
        advantages_S = centred_S * size_S / (size_S - 1).clamp(min=1)
    elif kind == "no_std":
        advantages_S = centred_S
    elif kind == "divide_by_mean":
        # a mean of 0 is one of rewards that are all 0, which differ in nothing and are set to 0 below
        advantages_S = centred_S / (rewards_S - centred_S)
    else:
        degrees_S = (size_S - 1).clamp(min=1) if std == "sample" else size_S
        variance_S = zeros_G.index_add(0, group_S, centred_S**2)[group_S] / degrees_S
        advantages_S = centred_S / (variance_S.sqrt() + eps)
    # equality is read off the rewards themselves: a mean that is off by one rounding would be blown up by 1/eps
    lowest_S = zeros_G.scatter_reduce(0, group_S, rewards_S, "amin", include_self=False)[group_S]
    highest_S = zeros_G.scatter_reduce(0, group_S, rewards_S, "amax", include_self=False)[group_S]
    return advantages_S.where(lowest_S < highest_S, 0.0).to(dtype)


def whitened_advantages(
    rewards_S: Tensor,
    groups_S: Tensor,
    lengths_S: Tensor,
    *,
    over: Literal["responses", "tokens"] = "responses",
    eps: float = 1e-6,
) -> Tensor:
    """Returns x = R − group mean, whitened over the batch with the sample std (REINFORCE++ with baseline, arXiv 2501.03262).

    With ``tokens`` a response counts ``lengths_S`` times, as in verl; groups of equal rewards then get an offset.
    """
    dtype = torch.promote_types(rewards_S.dtype, torch.float32)
    centred_S = group_advantages(rewards_S.double(), groups_S, kind="no_std")
    if over == "responses":
        return (centred_S / (_deviation(centred_S, torch.ones_like(centred_S), degrees=1) + eps)).to(dtype)
    count_S = lengths_S.double()
    centred_S = centred_S - (count_S * centred_S).sum() / count_S.sum().clamp(min=1)
    return (centred_S / (_deviation(centred_S, count_S, degrees=1) + eps)).to(dtype)


def gdpo_advantages(
    rewards_SK: Tensor,
    groups_S: Tensor,
    *,
    weights: Sequence[float] | None = None,
    std: Literal["sample", "population"] = "sample",
    eps: float = 1e-6,
) -> Tensor:
    """Returns Σ_k w_k (R_k − mean) / (std + eps), over its deviation in the batch + eps (GDPO, arXiv 2601.05242).

    The paper also subtracts the batch's mean, which is 0 already.
    """
    if rewards_SK.ndim != 2 or (weights is not None and len(weights) != rewards_SK.shape[1]):
        raise ValueError(
            f"objective.advantage.weights has {'no' if weights is None else len(weights)} entries, but the rewards have shape "
            f"{tuple(rewards_SK.shape)}; give one column, and one weight, for each reward"
        )
    dtype = torch.promote_types(rewards_SK.dtype, torch.float32)
    columns = [group_advantages(reward_S, groups_S, std=std, eps=eps) for reward_S in rewards_SK.double().unbind(1)]
    pairs = zip(weights or [1.0] * len(columns), columns, strict=True)
    total_S = torch.stack([weight * column_S for weight, column_S in pairs]).sum(0)
    return (total_S / (_deviation(total_S, torch.ones_like(total_S), degrees=int(std == "sample")) + eps)).to(dtype)


def _deviation(centred_S: Tensor, count_S: Tensor, *, degrees: int) -> Tensor:
    return ((count_S * centred_S**2).sum() / (count_S.sum() - degrees).clamp(min=1)).sqrt()


def overlong_penalty(response_lengths_S: Tensor, *, max_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> Tensor:
    """Returns DAPO's penalty, fp32 [S]: 0 up to ``max_tokens − buffer_tokens``, then linear to ``−penalty``."""
    over_S = response_lengths_S.float() - (max_tokens - buffer_tokens)
    return -penalty * (over_S / buffer_tokens).clamp(0.0, 1.0)
