"""Combines the shards' statistics of each row: the one collective of the forward pass.

K = 4 numbers per row: m = max x, Σ e^t, Σ e^t·t, x of the label (0 if another shard has it), with t = (x − m)/temperature,
without padding. The slope of the entropy adds Σ e^2t and Σ e^2t·t: K = 6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.errors import NotFiniteError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_gather(local: Tensor, group: ProcessGroup) -> Tensor:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the second is deprecated from 2.13 on
    gathered = local.new_empty(local.shape[0] * dist.get_world_size(group), *local.shape[1:])
    gather(gathered, local.contiguous(), group=group)
    return gathered


def reduce_scatter(values: Tensor, group: ProcessGroup) -> Tensor:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    local = values.new_empty(values.shape[0] // dist.get_world_size(group), *values.shape[1:])
    scatter(local, values.contiguous(), group=group)
    return local


EMPTY_MAX = -1e30
"""Of a shard without a finite logit; finite, since −inf · 0 is NaN."""


class RowScores(NamedTuple):
    """Scores of the R scored rows, and statistics for the backward pass: contiguous [R]."""

    logprob_R: Tensor
    entropy_R: Tensor
    max_R: Tensor
    """Not divided by the temperature."""
    log_sum_R: Tensor
    """log Σ exp((x − max)/temperature)."""


def combine(
    stats_RK: Tensor, rows_R: Tensor | None, temperature: float, tp_group: ProcessGroup | None
) -> tuple[RowScores, Tensor | None]:
    """All ranks of the group call and get the scores, and with K = 6 the slope of the entropy [R].

    Raises ValueError on all ranks if a row has NaN or +inf, or only −inf.
    """
    stats_pRK = stats_RK.unsqueeze(0)
    if tp_group is not None and stats_RK.numel():
        stats_pRK = all_gather(stats_RK, tp_group).view(-1, *stats_RK.shape)
    max_R, sum_R, weighted_R, label_R, *squares = merge(stats_pRK, temperature).unbind(-1)
    _check_finite(sum_R, stats_pRK[..., 1], rows_R)
    log_sum_R = sum_R.log()
    # log p = t − log S, and H = −Σ p log p = log S − Σ p t = log S − U/S
    label_t_R = (label_R - max_R) / temperature
    logprob_R = label_t_R - log_sum_R
    scores = RowScores(logprob_R, log_sum_R - weighted_R / sum_R, max_R.contiguous(), log_sum_R)
    if not squares:
        return scores, None
    square_R, weighted_square_R = squares
    return scores, _entropy_slope(sum_R, weighted_R, square_R, weighted_square_R, label_t_R, logprob_R)


def _entropy_slope(
    sum_R: Tensor, weighted_R: Tensor, square_R: Tensor, weighted_square_R: Tensor, label_t_R: Tensor, logprob_R: Tensor
) -> Tensor:
    """log p + H is t less its mean under p."""
    mean_R, label_p_R = weighted_R / sum_R, logprob_R.exp()
    label_term_R = torch.where(label_p_R > 0, label_p_R * (label_t_R - mean_R), 0.0)  # a label of −inf: not 0 · inf
    return (weighted_square_R - mean_R * square_R) / sum_R.square() - label_term_R


def merge(stats_pRK: Tensor, temperature: float) -> Tensor:
    max_pR, sum_pR, weighted_pR, label_pR, *squares = stats_pRK.unbind(-1)
    max_R = max_pR.amax(0)
    shift_pR = (max_pR - max_R) / temperature
    scale_pR = shift_pR.exp()
    # With the common maximum t becomes t + shift, so Σ e^t·t becomes e^shift · (Σ e^t·t + shift · Σ e^t).
    weighted_R = (scale_pR * (weighted_pR + shift_pR * sum_pR)).sum(0)
    merged = [max_R, (scale_pR * sum_pR).sum(0), weighted_R, label_pR.sum(0)]
    if squares:
        square_pR, weighted_square_pR = squares
        scale_pR = scale_pR.square()
        merged += [(scale_pR * square_pR).sum(0), (scale_pR * (weighted_square_pR + shift_pR * square_pR)).sum(0)]
    return torch.stack(merged, -1)


def _check_finite(sum_R: Tensor, sum_pR: Tensor, rows_R: Tensor | None) -> None:
    wrong_R = ~(sum_R.isfinite() & (sum_R > 0))
    if not wrong_R.any():
        return
    first = int(wrong_R.nonzero()[0])
    token = first if rows_R is None else int(rows_R[first])
    # A NaN or +inf makes the sum of its shard NaN or inf, which names the rank; a finite sum of 0 means that all are −inf.
    ranks = (~sum_pR[:, first].isfinite()).nonzero().flatten().tolist()
    if ranks:
        raise NotFiniteError(
            f"NaN or +inf logits on tensor-parallel rank {ranks[0]}, first at token {token}; look at the weights after the "
            "last step and at the learning rate"
        )
    raise NotFiniteError(f"every logit of token {token} is −inf; a sampler's mask must leave at least one token")
