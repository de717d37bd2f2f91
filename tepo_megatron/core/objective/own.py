"""What a kind of the user's own gives, looked at before it is used: one value per token or sequence, finite, on one device.

The kinds' classes are in ``config/objective/custom.py``; docs/guides/own-objective.md is their page.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tepo_megatron.config.objective.custom import OwnAdvantage, OwnAggregation, OwnKind, OwnMismatch, OwnRatio
    from tepo_megatron.core.objective.values import TokenValues
    from tepo_megatron.core.types import Batch


def own_advantages(kind: OwnAdvantage, batch: Batch) -> Tensor:
    """The advantages of a whole rollout batch: fp32 [S] (fp64 for fp64 rewards), detached."""
    given = _values(kind, kind.advantages(batch), "advantages", batch.rewards_S, "response")
    return given.detach().to(torch.promote_types(batch.rewards_S.dtype, torch.float32))


def own_log_ratio(kind: OwnRatio, values: TokenValues, delta_T: Tensor) -> Tensor:
    """The logarithm of the ratio at every token, [T], 0 outside the loss mask; ``delta_T`` stands in for that of ``values``."""
    given = _values(kind, kind.log_ratio(replace(values, delta_T=delta_T)), "log_ratio", delta_T, "token")
    return torch.where(values.mask_T, given, 0.0)


def own_token_weights(kind: OwnAggregation, lengths_S: Tensor, index_T: Tensor, mask_T: Tensor) -> Tensor:
    """What each token counts in the numerator, [T]; 0 outside the loss mask."""
    given = _values(kind, kind.sequence_weights(lengths_S), "sequence_weights", lengths_S, "sequence")
    return torch.where(mask_T, given.detach()[index_T], 0.0)


def own_denominator(kind: OwnAggregation, lengths_S: Tensor) -> Tensor:
    """The divisor of a step; a positive scalar of the dtype of ``lengths_S``."""
    given = torch.as_tensor(kind.denominator(lengths_S), dtype=lengths_S.dtype, device=lengths_S.device).detach()
    if given.ndim or not given.isfinite() or given <= 0:
        raise ValueError(
            f"{called(kind)}.denominator gave {given.tolist()} for a step of {lengths_S.numel()} sequences; give one positive "
            "number"
        )
    return given


def own_weights(kind: OwnMismatch, values: TokenValues) -> Tensor:
    """What multiplies the surrogate, [T], detached."""
    return _values(kind, kind.importance_weights(values), "importance_weights", values.delta_T, "token").detach()


def own_tokens(kind: OwnKind, given: Any, values: TokenValues) -> Tensor:
    """What ``choose`` gave, bool [T], within the loss mask."""
    return _values(kind, given, "choose", values.mask_T, "token") & values.mask_T


def own_token_values(kind: OwnKind, given: Any, method: str, values: TokenValues) -> Tensor:
    """What a method gave for every token, [T]."""
    return _values(kind, given, method, values.delta_T, "token")


def called(kind: OwnKind) -> str:
    """A kind in a sentence: where it stands, and its class."""
    return f"objective.{kind.slot} {kind.kind!r}: {type(kind).__name__}"


def _values(kind: OwnKind, given: Any, method: str, like: Tensor, each: str) -> Tensor:
    if not isinstance(given, Tensor):
        raise ValueError(f"{called(kind)}.{method} gave {type(given).__name__}; give a tensor with one value per {each}")
    if given.shape != like.shape:
        raise ValueError(
            f"{called(kind)}.{method} gave shape {tuple(given.shape)} for {like.numel()} {each}s; give one value per {each}, "
            "since sums and means are objective.aggregation's"
        )
    truth = like.dtype == torch.bool
    if truth != (given.dtype == torch.bool) or not (truth or given.is_floating_point()):
        wanted = "true or false" if truth else "floating-point numbers"
        raise ValueError(f"{called(kind)}.{method} gave {given.dtype}; give {wanted}")
    return given
