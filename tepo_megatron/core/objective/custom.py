"""Calls the methods of custom kinds and checks what they return."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tepo_megatron.config.objective.custom import CustomKind, OwnAdvantage, OwnAggregation, OwnMismatch, OwnRatio
    from tepo_megatron.core.objective.values import TokenValues
    from tepo_megatron.core.types import Batch


def custom_advantages(kind: OwnAdvantage, batch: Batch) -> Tensor:
    """Returns detached fp32 [S] (fp64 for fp64 rewards)."""
    values = _check(kind, kind.advantages(batch), "advantages", batch.rewards_S, "response")
    return values.detach().to(torch.promote_types(batch.rewards_S.dtype, torch.float32))


def custom_log_ratio(kind: OwnRatio, values: TokenValues, delta_T: Tensor) -> Tensor:
    """Returns [T], 0 outside the loss mask; ``delta_T`` replaces that of ``values``."""
    log_ratio_T = _check(kind, kind.log_ratio(replace(values, delta_T=delta_T)), "log_ratio", delta_T, "token")
    return torch.where(values.mask_T, log_ratio_T, 0.0)


def custom_token_weights(kind: OwnAggregation, lengths_S: Tensor, index_T: Tensor, mask_T: Tensor) -> Tensor:
    weights_S = _check(kind, kind.sequence_weights(lengths_S), "sequence_weights", lengths_S, "sequence")
    return torch.where(mask_T, weights_S.detach()[index_T], 0.0)


def custom_denominator(kind: OwnAggregation, lengths_S: Tensor) -> Tensor:
    """Raises ValueError unless the divisor is a positive scalar."""
    divisor = torch.as_tensor(kind.denominator(lengths_S), dtype=lengths_S.dtype, device=lengths_S.device).detach()
    if divisor.ndim or not divisor.isfinite() or divisor <= 0:
        raise ValueError(
            f"{_describe(kind)}.denominator gave {divisor.tolist()} for a step of {lengths_S.numel()} sequences; give one "
            "positive number"
        )
    return divisor


def custom_weights(kind: OwnMismatch, values: TokenValues) -> Tensor:
    return _check(kind, kind.importance_weights(values), "importance_weights", values.delta_T, "token").detach()


def check_token_mask(kind: CustomKind, chosen: Any, values: TokenValues) -> Tensor:
    """Returns bool [T] within the loss mask."""
    return _check(kind, chosen, "choose", values.mask_T, "token") & values.mask_T


def check_token_values(kind: CustomKind, result: Any, method: str, values: TokenValues) -> Tensor:
    return _check(kind, result, method, values.delta_T, "token")


def _describe(kind: CustomKind) -> str:
    return f"objective.{kind.slot} {kind.kind!r}: {type(kind).__name__}"


def _check(kind: CustomKind, result: Any, method: str, like: Tensor, unit: str) -> Tensor:
    name = f"{_describe(kind)}.{method}"
    if not isinstance(result, Tensor):
        raise ValueError(f"{name} gave {type(result).__name__}; give a tensor with one value per {unit}")
    if result.shape != like.shape:
        raise ValueError(
            f"{name} gave shape {tuple(result.shape)} for {like.numel()} {unit}s; give one value per {unit}, since sums and "
            "means are objective.aggregation's"
        )
    is_mask = like.dtype == torch.bool
    if is_mask != (result.dtype == torch.bool) or not (is_mask or result.is_floating_point()):
        raise ValueError(f"{name} gave {result.dtype}; give {'true or false' if is_mask else 'floating-point numbers'}")
    return result
