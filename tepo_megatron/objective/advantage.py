"""Advantages from rewards within groups (docs/tepo.md, "Advantage"). S sequences."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def group_advantages(
    rewards_S: Tensor,
    groups_S: Tensor,
    *,
    kind: Literal["group", "no_std", "leave_one_out"] = "group",
    std: Literal["sample", "population"] = "sample",
    eps: float = 1e-6,
) -> Tensor:
    """One advantage per sequence, relative to the sequences of the same group, wherever they stand and however many they are.

    ``group`` is (R − mean) / (std + eps) (docs/tepo.md, equation 1); ``no_std`` is R − mean (Dr.GRPO); ``leave_one_out`` is R
    minus the mean of the others. Sequences of a group whose rewards are all equal, and of a group of one, get exactly 0.

    Args:
        rewards_S: float [S].
        groups_S: int64 [S], any numbers; equal numbers make a group.

    Returns:
        fp32 [S] (fp64 for fp64 rewards), detached.

    Raises:
        ValueError: shapes differ, or a reward is not finite.
    """
    if rewards_S.ndim != 1 or rewards_S.shape != groups_S.shape:
        raise ValueError(
            f"rewards_S has shape {tuple(rewards_S.shape)} and groups_S {tuple(groups_S.shape)}; give one of each per sequence"
        )
    finite_S = rewards_S.isfinite()
    if not finite_S.all():
        first = int((~finite_S).nonzero()[0])
        raise ValueError(f"the reward of sequence {first} is {rewards_S[first].item()}; rewards must be finite numbers")
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
    else:
        degrees_S = (size_S - 1).clamp(min=1) if std == "sample" else size_S
        variance_S = zeros_G.index_add(0, group_S, centred_S**2)[group_S] / degrees_S
        advantages_S = centred_S / (variance_S.sqrt() + eps)
    # equality is read off the rewards themselves: a mean that is off by one rounding would be blown up by 1/eps
    lowest_S = zeros_G.scatter_reduce(0, group_S, rewards_S, "amin", include_self=False)[group_S]
    highest_S = zeros_G.scatter_reduce(0, group_S, rewards_S, "amax", include_self=False)[group_S]
    return advantages_S.where(lowest_S < highest_S, 0.0).to(dtype)


def overlong_penalty(response_lengths_S: Tensor, *, max_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> Tensor:
    """DAPO's soft penalty, to be added to the rewards: 0 up to ``max_tokens − buffer_tokens`` response tokens, then falling
    linearly to ``−penalty`` at ``max_tokens`` and staying there. Lengths int64 [S] in, fp32 [S] out."""
    over_S = response_lengths_S.float() - (max_tokens - buffer_tokens)
    return -penalty * (over_S / buffer_tokens).clamp(0.0, 1.0)
