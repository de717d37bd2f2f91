"""A rank's columns of the vocabulary, the rows to score, and the merge of the shards' statistics.

T tokens, R scored tokens, V true vocabulary, Vp columns per rank with padding.

K = 4 statistics per row: m = max x, Σ e^t, Σ e^t·t, x of the label (0 if another shard has it), with t = (x − m)/temperature.
The slope of the entropy adds Σ e^2t and Σ e^2t·t: K = 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.errors import NotFiniteError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LocalLabels(NamedTuple):
    column_R: Tensor  # int64; 0 if another shard has the label
    inside_R: Tensor


class _KeptColumns(NamedTuple):
    column_RK: Tensor
    inside_RK: Tensor

    def of(self, rows: slice) -> _KeptColumns:
        return _KeptColumns(self.column_RK[rows], self.inside_RK[rows])


@dataclass(frozen=True)
class Scoring:
    tp_group: ProcessGroup | None
    temperature: float
    columns: int  # without padding, which is at the end
    tokens: int
    rows_R: Tensor | None  # int64; None if all are scored
    labels: LocalLabels
    entropy_slope: bool = False
    kept_tokens: _KeptColumns | None = None  # None: the whole vocabulary

    @property
    def statistics(self) -> int:
        return 6 if self.entropy_slope else 4

    @property
    def count(self) -> int:
        return self.labels.column_R.numel()


def plan_scoring(
    labels_T: Tensor,
    *,
    tokens: int,
    width: int,
    tp_group: ProcessGroup | None,
    temperature: float,
    vocab_size: int | None,
    mask_T: Tensor | None,
    entropy_slope: bool,
    kept_TK: Tensor | None = None,
) -> Scoring:
    """``width``: columns of the shard with padding. Raises ValueError."""
    rank, world = (0, 1) if tp_group is None else (dist.get_rank(tp_group), dist.get_world_size(tp_group))
    vocab_size = width * world if vocab_size is None else vocab_size
    if not 0 < vocab_size <= width * world:
        raise ValueError(
            f"vocab_size = {vocab_size}, but {world} shards of {width} columns hold {width * world}; give the tokenizer's size "
            "without padding"
        )
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature = {temperature:g} must be positive and finite; score at the temperature sampled with")
    rows_R = _scored_rows(mask_T, labels_T, tokens)
    labels_R = labels_T if rows_R is None else labels_T[rows_R]
    _check_labels(labels_R, rows_R, vocab_size)
    # Padding is at the end of the whole vocabulary: the last shards have it, and a small one may be padding alone.
    columns = min(max(vocab_size - rank * width, 0), width)
    labels = LocalLabels(*_local(labels_R, rank * width, columns))
    kept_tokens = None
    if kept_TK is not None:
        kept_RK = _kept_of_rows(kept_TK, rows_R, tokens)
        _check_kept(kept_RK, labels_R, rows_R, vocab_size)
        kept_tokens = _KeptColumns(*_local(kept_RK, rank * width, columns))
    return Scoring(tp_group, temperature, columns, tokens, rows_R, labels, entropy_slope, kept_tokens)


def _local(ids: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    column = ids - first
    inside = (column >= 0) & (column < columns) & (ids >= 0)
    return torch.where(inside, column, 0), inside


def _scored_rows(mask_T: Tensor | None, labels_T: Tensor, tokens: int) -> Tensor | None:
    if labels_T.shape != (tokens,) or labels_T.dtype != torch.int64:
        raise ValueError(
            f"labels_T is {labels_T.dtype} {tuple(labels_T.shape)} beside {tokens} rows to score; give int64, one label per row"
        )
    if mask_T is None:
        return None
    if mask_T.shape != (tokens,) or mask_T.dtype != torch.bool:
        raise ValueError(f"mask_T is {mask_T.dtype} {tuple(mask_T.shape)} for {tokens} tokens; give bool, one entry per token")
    return mask_T.nonzero().squeeze(1)


def _check_labels(labels_R: Tensor, rows_R: Tensor | None, vocab_size: int) -> None:
    wrong_R = (labels_R < 0) | (labels_R >= vocab_size)
    if wrong_R.any():
        first = int(wrong_R.nonzero()[0])
        token = first if rows_R is None else int(rows_R[first])
        raise ValueError(
            f"the label of token {token} is {int(labels_R[first])}, outside [0, {vocab_size}); leave tokens without a label "
            "out of mask_T, and check that tokenizer and model agree on the vocabulary"
        )


def _kept_of_rows(kept_TK: Tensor, rows_R: Tensor | None, tokens: int) -> Tensor:
    if kept_TK.ndim != 2 or kept_TK.shape[0] != tokens or kept_TK.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"kept_TK is {kept_TK.dtype} {tuple(kept_TK.shape)} for {tokens} tokens; give int32 or int64 [tokens, K], -1 where "
            "a token has fewer than K"
        )
    return (kept_TK if rows_R is None else kept_TK[rows_R]).long()


def _check_kept(kept_RK: Tensor, labels_R: Tensor, rows_R: Tensor | None, vocab_size: int) -> None:
    wrong_RK = (kept_RK >= vocab_size) | (kept_RK == labels_R.unsqueeze(1))
    if wrong_RK.any():
        first, index = wrong_RK.nonzero()[0].tolist()
        token, result = first if rows_R is None else int(rows_R[first]), int(kept_RK[first, index])
        problem = f"is outside [0, {vocab_size})" if result >= vocab_size else "is the label itself, which counts already"
        raise ValueError(f"kept token {result} of token {token} {problem}; sampler and model must agree on the vocabulary")


def to_tokens(values_R: Tensor, scoring: Scoring) -> Tensor:
    if scoring.rows_R is None:
        return values_R
    return values_R.new_zeros(scoring.tokens).index_copy(0, scoring.rows_R, values_R)


def of_rows(values_T: Tensor, scoring: Scoring) -> Tensor:
    return values_T if scoring.rows_R is None else values_T[scoring.rows_R]


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


EMPTY_MAX = -1e30  # of a shard without a finite logit; finite, since −inf · 0 is NaN


class RowScores(NamedTuple):
    """Contiguous [R]."""

    logprob_R: Tensor
    entropy_R: Tensor
    max_R: Tensor  # not divided by the temperature
    log_sum_R: Tensor  # log Σ exp((x − max)/temperature)


def combine(
    stats_RK: Tensor, rows_R: Tensor | None, temperature: float, tp_group: ProcessGroup | None
) -> tuple[RowScores, Tensor | None]:
    """Every rank calls. K = 6 gives the slope of the entropy. Raises ValueError on all ranks."""
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
    """Uses log p + H = t minus its mean under p."""
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
