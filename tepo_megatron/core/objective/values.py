"""Inputs of the objective's terms, and checks of values from outside.

The covariance is c_it = (log π_old(y_it) − mean)(A_i − mean) (docs/reference/tepo.md, equation 10).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.config.objective.custom import CustomKind

# Bounds logarithms of ratios: exp, and its sum over a million tokens, stay finite in fp32, and its gradient is not 0 · ∞.
LARGEST = 60.0


@dataclass(frozen=True)
class StepValues:
    """The R response tokens of a mini-batch: [R], detached, the same on all ranks."""

    old_logprob_R: Tensor
    advantage_R: Tensor
    labels_R: Tensor
    mismatch_R: Tensor
    """log π_old − log π_sampler."""
    covariance_R: Tensor
    old_entropy_R: Tensor | None
    entropy_noise: float = 0.0
    """Rounding noise in nats; 0 if not measured."""


@dataclass(frozen=True)
class TokenValues:
    """A micro-batch's tokens: [T], zero outside the loss mask except ``index_T``, ``labels_T``, ``covariance_T``."""

    mask_T: Tensor
    """Response tokens."""
    index_T: Tensor
    labels_T: Tensor
    advantage_T: Tensor
    logprob_T: Tensor
    """With gradient."""
    old_logprob_T: Tensor
    delta_T: Tensor
    """log π_θ − log π_old."""
    reference_delta_T: Tensor | None
    """log π_θ − log π_ref."""
    teacher_delta_T: Tensor | None
    """log π_θ − log π_teacher."""
    divergence_T: Tensor | None
    """See `TokenScores`."""
    entropy_T: Tensor
    """Of the full distribution, in nats."""
    entropy_change_T: Tensor | None
    """H(π_θ) − H(π_old), detached."""
    entropy_slope_T: Tensor | None
    """See `TokenScores`."""
    mismatch_T: Tensor
    """log π_old − log π_sampler."""
    covariance_T: Tensor
    lengths_S: Tensor
    """Response tokens, floating point."""

    @property
    def importance_T(self) -> Tensor:
        return self.delta_T.clamp(-LARGEST, LARGEST).exp()

    def without_gradient(self, where_T: Tensor) -> TokenValues:
        """Detaches tokens before their response shares a ratio, since the others' copies of it would carry their gradient."""
        items = ((name, value_T) for name, value_T in vars(self).items() if value_T is not None and value_T.requires_grad)
        return replace(self, **{name: torch.where(where_T, value_T.detach(), value_T) for name, value_T in items})


def check_custom(kind: CustomKind, result: Any, method: str, like: Tensor, unit: str = "token") -> Tensor:
    """Raises ValueError unless ``result`` has ``like``'s shape and kind."""
    name = f"objective.{kind.slot} {kind.kind!r}: {type(kind).__name__}.{method}"
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
