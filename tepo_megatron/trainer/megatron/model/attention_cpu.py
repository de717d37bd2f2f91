"""Causal attention over packed sequences (``thd``) without Transformer Engine.

Right-padding keeps plain causal attention exact.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tepo_megatron.trainer.megatron.parallel.positions import local_positions, rank_order


class PackedDotProductAttention(torch.nn.Module):
    def __init__(self, config: TransformerConfig, *, pg_collection: ProcessGroupCollection | None = None, **_: object) -> None:
        super().__init__()
        self.softmax_scale = config.softmax_scale
        self.cp = config.context_parallel_size
        self.cp_group = pg_collection.cp if pg_collection is not None and self.cp > 1 else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: object, packed_seq_params: PackedSeqParams, **__: object
    ) -> Tensor:
        """query [t, heads, d], key and value [t, kv heads, d] → [t, heads · d]."""
        lengths = tuple(packed_seq_params.cu_seqlens_q.diff().tolist())
        queries, keys = _divide(lengths, self.cp, query.device)
        places: Iterable[Tensor | None] = repeat(None)
        if self.cp_group is not None:
            order_T = rank_order(lengths, self.cp)
            # backward: every rank's loss has a gradient for the keys and values of all, and they are summed
            both = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=self.cp_group)
            key, value = both[torch.from_numpy(order_T.argsort())].chunk(2, -1)
            positions_t = torch.from_numpy(local_positions(lengths, self.cp, self.cp_group.rank())).to(query.device)
            places = queries.rows(positions_t[:, None])
        attended = []
        for q, k, v, seen in zip(queries.rows(query), keys.rows(key), keys.rows(value), places, strict=False):
            visible = None
            if seen is not None:
                visible = torch.arange(k.size(2), device=query.device) <= seen[..., None]
            # With grouped queries each key/value head serves as many neighbouring query heads.
            options = {"scale": self.softmax_scale, "enable_gqa": True}
            block = scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None, **options)
            attended.append(block.transpose(1, 2).flatten(0, 1))
        return queries.tokens(attended).flatten(1)


@dataclass(frozen=True)
class _Rows:
    """Blocks of rows of one length, with sequences of like lengths: places among N padded and T tokens."""

    source_N: Tensor
    place_T: Tensor
    padding: Tensor
    shapes: Sequence[tuple[int, int]]

    def rows(self, values: Tensor) -> Iterator[Tensor]:
        """[T, heads, …] → [sequences, heads, longest, …] of each block."""
        moved = _Move.apply(values, self.source_N, self.place_T, None)
        blocks = moved.split([count * longest for count, longest in self.shapes])
        return (block.unflatten(0, shape).transpose(1, 2) for block, shape in zip(blocks, self.shapes, strict=True))

    def tokens(self, blocks: list[Tensor]) -> Tensor:
        joined = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        moved: Tensor = _Move.apply(joined, self.place_T, self.source_N, self.padding)
        return moved


class _Move(torch.autograd.Function):
    """``values[index]``. Its gradient is moved back by ``inverse``, without a sum: no token counts in two places."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, inverse: Tensor, unused: Tensor | None) -> Tensor:
        ctx.inverse, ctx.unused = inverse, unused
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        result = gradient.index_select(0, ctx.inverse)
        return result if ctx.unused is None else result.index_fill_(0, ctx.unused, 0), None, None, None


@lru_cache(maxsize=4)  # the layers of a micro-batch
def _divide(lengths: tuple[int, ...], cp: int, device: torch.device) -> tuple[_Rows, _Rows]:
    """Rows of a rank's queries, and of all keys."""
    blocks = _like_lengths(lengths)
    keys = _divide_into(lengths, blocks, device)
    return (keys if cp == 1 else _divide_into([length // cp for length in lengths], blocks, device)), keys


def _divide_into(lengths: Sequence[int], blocks: Sequence[Sequence[int]], device: torch.device) -> _Rows:
    lengths_S = np.array(lengths)
    starts_S = lengths_S.cumsum() - lengths_S
    shapes, sources, real = [], [], []
    for members in blocks:
        longest = int(lengths_S[members].max())
        position = np.arange(longest)
        last = lengths_S[members][:, None] - 1
        sources.append((starts_S[members][:, None] + np.minimum(position, last)).ravel())  # padded by its last token
        real.append((position <= last).ravel())
        shapes.append((len(members), longest))
    source_N, real_N = np.concatenate(sources), np.concatenate(real)
    place_T = np.empty(lengths_S.sum(), np.int64)
    place_T[source_N[real_N]] = real_N.nonzero()[0]
    source, place, padding = (torch.from_numpy(index).to(device) for index in (source_N, place_T, (~real_N).nonzero()[0]))
    return _Rows(source, place, padding, shapes)


_LONGER, _SLACK = 1.5, 16


def _like_lengths(lengths: Sequence[int]) -> list[list[int]]:
    blocks: list[list[int]] = []
    longest = 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if not blocks or longest > _LONGER * lengths[number] + _SLACK:
            blocks.append([])
            longest = lengths[number]
        blocks[-1].append(number)
    return blocks
