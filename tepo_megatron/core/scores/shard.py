"""The columns of the vocabulary on a rank, the rows to score, and checks of the arguments.

T tokens, R scored tokens, V true vocabulary, Vp columns per rank with padding: rank r holds columns [r·Vp, (r+1)·Vp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LocalLabels(NamedTuple):
    column_R: Tensor
    """int64 [R]; 0 if another shard has the label."""
    inside_R: Tensor


class _KeptColumns(NamedTuple):
    """The same for the other tokens in a sampler's mask, [R, K]."""

    column_RK: Tensor
    inside_RK: Tensor

    def of(self, rows: slice) -> _KeptColumns:
        return _KeptColumns(self.column_RK[rows], self.inside_RK[rows])


@dataclass(frozen=True)
class Scoring:
    """The checked arguments of one call on this rank."""

    tp_group: ProcessGroup | None
    temperature: float
    columns: int
    """Columns without padding, which is at the end."""
    tokens: int
    rows_R: Tensor | None
    """int64; None if all are scored."""
    labels: LocalLabels
    entropy_slope: bool = False
    kept: _KeptColumns | None = None
    """None: the whole vocabulary."""

    @property
    def statistics(self) -> int:
        """K of `combine`."""
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
    """Raises ValueError for impossible arguments. ``width``: columns of the shard with padding."""
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
    kept = None
    if kept_TK is not None:
        kept_RK = _kept_of_rows(kept_TK, rows_R, tokens)
        _check_kept(kept_RK, labels_R, rows_R, vocab_size)
        kept = _KeptColumns(*_local(kept_RK, rank * width, columns))
    return Scoring(tp_group, temperature, columns, tokens, rows_R, labels, entropy_slope, kept)


def _local(ids: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Returns columns in the shard, 0 for tokens of other shards, and whether they are in it."""
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
        said = f"is outside [0, {vocab_size})" if result >= vocab_size else "is the label itself, which counts already"
        raise ValueError(f"kept token {result} of token {token} {said}; sampler and model must agree on the vocabulary")


def to_tokens(values_R: Tensor, scoring: Scoring) -> Tensor:
    if scoring.rows_R is None:
        return values_R
    return values_R.new_zeros(scoring.tokens).index_copy(0, scoring.rows_R, values_R)


def of_rows(values_T: Tensor, scoring: Scoring) -> Tensor:
    return values_T if scoring.rows_R is None else values_T[scoring.rows_R]
