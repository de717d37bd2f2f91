"""Advantages from rewards within groups (docs/reference/tepo.md)."""

from typing import Literal

import torch
from torch import Tensor

from tepo_megatron.config.objective.choices import Advantage, GDPOAdvantage
from tepo_megatron.config.objective.custom import OwnAdvantage
from tepo_megatron.core.objective.ratio import sequence_sum
from tepo_megatron.core.objective.values import check_custom
from tepo_megatron.core.types import Batch

_Kind = Literal["group", "no_std", "leave_one_out", "divide_by_mean"]
_Std = Literal["sample", "population"]


def advantages(choice: Advantage, batch: Batch) -> Tensor:
    """Returns fp32 [S] (fp64 for fp64 rewards), detached.

    Raises ValueError for rewards that are not finite, or negative with ``divide_by_mean``.
    """
    dtype = torch.promote_types(batch.rewards_S.dtype, torch.float32)
    if isinstance(choice, OwnAdvantage):
        values_S = check_custom(choice, choice.advantages(batch), "advantages", batch.rewards_S, "response")
        return values_S.detach().to(dtype)
    if choice.kind == "teacher":
        return torch.zeros_like(batch.rewards_S, dtype=dtype)
    if choice.kind == "gdpo":
        parts_SK = batch.rewards_S.unsqueeze(1) if batch.reward_parts_SK is None else batch.reward_parts_SK
        return _gdpo(choice, parts_SK, batch.groups_S).to(torch.promote_types(parts_SK.dtype, torch.float32))
    if choice.kind == "divide_by_mean":
        return _within_groups(batch.rewards_S, batch.groups_S, choice.kind).to(dtype)
    lengths_S = sequence_sum(batch.loss_mask_T.long(), batch.sequence_index_T, batch.num_sequences)
    rewards_S = batch.rewards_S
    if choice.overlong is not None:
        long = choice.overlong  # DAPO's penalty: 0 up to max_tokens − buffer_tokens, then linear to −penalty
        over_S = (lengths_S.float() - (long.max_tokens - long.buffer_tokens)) / long.buffer_tokens
        rewards_S = rewards_S - long.penalty * over_S.clamp(0.0, 1.0)
    if choice.kind != "whitened":
        options = (choice.std, choice.eps) if choice.kind == "group" else ()
        return _within_groups(rewards_S, batch.groups_S, choice.kind, *options).to(dtype)
    # REINFORCE++ with baseline, arXiv 2501.03262; by tokens, as in verl, groups of equal rewards get an offset
    centred_S = _within_groups(rewards_S, batch.groups_S, "no_std")
    count_S = torch.ones_like(centred_S) if choice.over == "responses" else lengths_S.double()
    if choice.over == "tokens":
        centred_S = centred_S - (count_S * centred_S).sum() / count_S.sum().clamp(min=1)
    return (centred_S / (_deviation(centred_S, count_S, "sample") + choice.eps)).to(dtype)


def _within_groups(rewards_S: Tensor, groups_S: Tensor, kind: _Kind, std: _Std = "sample", eps: float = 0.0) -> Tensor:
    """Returns fp64 [S]; exactly 0 for groups of equal rewards.

    ``group`` is (R − mean) / (std + eps) (equation 1); ``no_std`` R − mean; ``leave_one_out`` R minus the others' mean;
    ``divide_by_mean`` (R − mean) / mean.
    """
    if rewards_S.ndim != 1 or rewards_S.shape != groups_S.shape:
        raise ValueError(
            f"rewards_S has shape {tuple(rewards_S.shape)} and groups_S {tuple(groups_S.shape)}; give one of each per sequence"
        )
    _refuse(~rewards_S.isfinite(), rewards_S, "rewards must be finite numbers")
    if kind == "divide_by_mean":
        rule = "objective.advantage.kind = 'divide_by_mean' divides by the group's mean, so rewards must not be negative"
        _refuse(rewards_S < 0, rewards_S, f"{rule}; shift them, or choose another kind")
    rewards_S = rewards_S.detach().double()
    _, group_S = torch.unique(groups_S, return_inverse=True)
    zeros_G = rewards_S.new_zeros(int(group_S.max()) + 1 if group_S.numel() else 0)
    size_S = zeros_G.index_add(0, group_S, torch.ones_like(rewards_S))[group_S]
    centred_S = rewards_S - zeros_G.index_add(0, group_S, rewards_S)[group_S] / size_S
    advantages_S = centred_S
    if kind == "leave_one_out":
        # R − (ΣR − R) / (n − 1) = (R − ΣR / n) · n / (n − 1)
        advantages_S = centred_S * size_S / (size_S - 1).clamp(min=1)
    elif kind == "divide_by_mean":
        # a mean of 0 is one of rewards that are all 0, which differ in nothing and are set to 0 below
        advantages_S = centred_S / (rewards_S - centred_S)
    elif kind == "group":
        degrees_S = (size_S - 1).clamp(min=1) if std == "sample" else size_S
        variance_S = zeros_G.index_add(0, group_S, centred_S**2)[group_S] / degrees_S
        advantages_S = centred_S / (variance_S.sqrt() + eps)
    # equality is read off the rewards themselves: a mean that is off by one rounding would be blown up by 1/eps
    lowest_S = zeros_G.scatter_reduce(0, group_S, rewards_S, "amin", include_self=False)[group_S]
    highest_S = zeros_G.scatter_reduce(0, group_S, rewards_S, "amax", include_self=False)[group_S]
    return advantages_S.where(lowest_S < highest_S, 0.0)


def _refuse(wrong_S: Tensor, rewards_S: Tensor, rule: str) -> None:
    if wrong_S.any():
        first = int(wrong_S.nonzero()[0])
        raise ValueError(f"the reward of sequence {first} is {rewards_S[first].item():g}; {rule}")


def _gdpo(choice: GDPOAdvantage, rewards_SK: Tensor, groups_S: Tensor) -> Tensor:
    """Returns Σ_k w_k (R_k − mean) / (std + eps), over its deviation in the batch + eps (arXiv 2601.05242). The batch's mean,
    which the paper subtracts, is already 0.
    """
    if choice.weights is not None and len(choice.weights) != rewards_SK.shape[1]:
        raise ValueError(
            f"objective.advantage.weights has {len(choice.weights)} entries, but the rewards have shape "
            f"{tuple(rewards_SK.shape)}; give one column, and one weight, for each reward"
        )
    columns = [_within_groups(reward_S, groups_S, "group", choice.std, choice.eps) for reward_S in rewards_SK.unbind(1)]
    pairs = zip(choice.weights or [1.0] * len(columns), columns, strict=True)
    total_S = torch.stack([weight * column_S for weight, column_S in pairs]).sum(0)
    return total_S / (_deviation(total_S, torch.ones_like(total_S), choice.std) + choice.eps)


def _deviation(centred_S: Tensor, count_S: Tensor, std: _Std) -> Tensor:
    return ((count_S * centred_S**2).sum() / (count_S.sum() - int(std == "sample")).clamp(min=1)).sqrt()
