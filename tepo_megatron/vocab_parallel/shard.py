"""Which columns of the vocabulary a rank holds, which rows are to be scored, and whether the arguments fit together.

Axes: T tokens, R scored tokens (those in the mask), V true vocabulary, p tensor-parallel size, Vp columns per rank, padding
included: rank r holds columns [r·Vp, (r+1)·Vp), of which those from V on are padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class VocabShard:
    rank: int
    world: int
    start: int
    """First vocabulary entry of this shard."""
    columns: int
    """Columns that are no padding; 0 where the whole shard is padding."""
    vocab_size: int

    @classmethod
    def of(cls, width: int, vocab_size: int | None, tp_group: ProcessGroup | None) -> VocabShard:
        """The shard of this rank, ``width`` columns wide with padding.

        Raises:
            ValueError: ``vocab_size`` is not positive, or more than all shards hold.
        """
        rank, world = (0, 1) if tp_group is None else (dist.get_rank(tp_group), dist.get_world_size(tp_group))
        total = width * world
        size = total if vocab_size is None else vocab_size
        if not 0 < size <= total:
            raise ValueError(f"vocab_size = {size}, but {world} shards of {width} columns hold {total}; give the true vocabulary size")
        start = rank * width
        return cls(rank, world, start, min(max(size - start, 0), width), size)

    def local(self, labels_R: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each label in this shard (0 where it lies outside) and whether it lies inside: int64, bool."""
        local_R = labels_R - self.start
        inside_R = (local_R >= 0) & (local_R < self.columns)
        return torch.where(inside_R, local_R, 0), inside_R


def scored_rows(mask_T: Tensor | None, labels_T: Tensor, tokens: int) -> Tensor | None:
    """Indices int64 [R] of the tokens in the mask, ``None`` for all.

    Raises:
        ValueError: shapes or types do not fit.
    """
    if labels_T.shape != (tokens,) or labels_T.dtype != torch.int64:
        raise ValueError(
            f"labels_T is {labels_T.dtype} {tuple(labels_T.shape)} beside {tokens} rows of logits or hidden states; give int64, one "
            "label per row"
        )
    if mask_T is None:
        return None
    if mask_T.shape != (tokens,) or mask_T.dtype != torch.bool:
        raise ValueError(f"mask_T is {mask_T.dtype} {tuple(mask_T.shape)} for {tokens} tokens; give bool, one entry per token")
    return mask_T.nonzero().squeeze(1)


def check_labels(labels_R: Tensor, rows_R: Tensor | None, vocab_size: int) -> None:
    """Refuse labels outside [0, V)."""
    wrong_R = (labels_R < 0) | (labels_R >= vocab_size)
    if wrong_R.any():
        first = int(wrong_R.nonzero()[0])
        token = first if rows_R is None else int(rows_R[first])
        raise ValueError(
            f"the label of token {token} is {int(labels_R[first])}, outside [0, {vocab_size}); leave tokens without a label out of "
            "mask_T, and check that tokenizer and model agree on the vocabulary"
        )


def check_temperature(temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature = {temperature:g} must be positive; for greedy sampling score at the temperature trained with")
