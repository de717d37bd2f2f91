"""The inputs of the objective's terms, and checks of values from outside.

The covariance is c_it = (log π_old(y_it) − mean)(A_i − mean) (docs/reference/tepo.md, equation 10).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tepo_megatron.errors import NotFiniteError

if TYPE_CHECKING:
    from tepo_megatron.config.objective.custom import CustomKind
    from tepo_megatron.core.types import Batch, TokenScores


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


def covariance_statistic(logprob_T: Tensor, advantage_T: Tensor, logprob_mean: Tensor, advantage_mean: Tensor) -> Tensor:
    return (logprob_T - logprob_mean) * (advantage_T - advantage_mean)


def exact_mean(values_T: Tensor) -> Tensor:
    """In fp64, so that equal values have an equal mean; otherwise rounding errors of c would choose tokens."""
    return values_T.double().mean().to(values_T.dtype)


def token_count(fraction: float, tokens: int) -> int:
    return min(max(int(fraction * tokens), 1), tokens)


def check_step(batch: Batch, *, reference: bool) -> None:
    """Raises ValueError."""
    if batch.advantages_S is None:
        raise ValueError("the batch has no advantages_S; fill it with objective.advantages(batch)")
    if batch.old_logprobs_T is None:
        raise ValueError("the batch has no old_logprobs_T; score it with the policy before the update")
    if reference and batch.reference_logprobs_T is None:
        raise ValueError(
            "a KL term is against the reference, but the batch has no reference_logprobs_T; score it with that model"
        )
    if batch.advantages_S.shape != (batch.num_sequences,):
        raise ValueError(f"advantages_S has shape {tuple(batch.advantages_S.shape)} for {batch.num_sequences} sequences")
    if not batch.advantages_S.isfinite().all():
        raise NotFiniteError("advantages_S holds values that are not finite; look at the rewards")
    names = ("old_logprobs_T", "sampler_logprobs_T", "old_entropy_T", "reference_logprobs_T")
    _check_token_values({name: getattr(batch, name) for name in names}, batch)


def check_scores(scores: TokenScores, batch: Batch) -> None:
    """Raises ValueError."""
    _check_token_values({f"scores.{name}": values_T for name, values_T in vars(scores).items()}, batch)


def _check_token_values(values_by_name: dict[str, Tensor | None], batch: Batch) -> None:
    shape = tuple(batch.tokens_T.shape)
    if batch.loss_mask_T.shape != shape:
        raise ValueError(
            f"loss_mask_T has shape {tuple(batch.loss_mask_T.shape)} but tokens_T {shape}; the mask needs one entry per token"
        )
    for name, values_T in values_by_name.items():
        if values_T is None:
            continue
        if values_T.shape != shape:
            raise ValueError(f"{name} has shape {tuple(values_T.shape)} but tokens_T {shape}; give one value per token")
        wrong_T = batch.loss_mask_T & ~values_T.isfinite()
        if wrong_T.any():
            token = int(wrong_T.nonzero()[0])
            raise NotFiniteError(
                f"{name} is {values_T[token].item()} at token {token} (sequence {int(batch.sequence_index_T[token])}, label "
                f"{int(batch.labels_T[token])}), which is in the loss mask, so no ratio exists; score under the sampler's "
                "temperature and without a top-k or top-p mask, or take the token out of loss_mask_T"
            )


def describe_kind(kind: CustomKind) -> str:
    return f"objective.{kind.slot} {kind.kind!r}: {type(kind).__name__}"


def check_custom(kind: CustomKind, result: Any, method: str, like: Tensor, unit: str = "token") -> Tensor:
    """Raises ValueError unless ``result`` has the shape and kind of ``like``."""
    name = f"{describe_kind(kind)}.{method}"
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
