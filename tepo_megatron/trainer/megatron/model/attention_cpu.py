"""Causal attention over packed sequences (``thd``) without Transformer Engine.

Right-padded rows make plain causal attention exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tepo_megatron.trainer.megatron.batch import packed_order, rank_order


class PackedDotProductAttention(torch.nn.Module):
    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = config.softmax_scale
        self.cp = config.context_parallel_size
        self.cp_group = pg_collection.cp if pg_collection is not None and self.cp > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> Tensor:
        """query [t, heads, d], key and value [t, kv heads, d] → [t, heads · d]."""
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        order = like_lengths(lengths)
        whole = local = arrange(lengths, order, query.device)
        visible: list[Tensor | None] = [None] * len(order)
        if self.cp_group is not None:
            order_T = rank_order(packed_seq_params.cu_seqlens_q, self.cp)
            # backward: every rank's loss has a gradient for the keys and values of all, and they are summed
            both = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=self.cp_group)
            key, value = both[packed_order(order_T)].chunk(2, -1)
            local = arrange([length // self.cp for length in lengths], order, query.device)
            positions_T = torch.cat([torch.arange(length, device=query.device) for length in lengths])
            positions_t = positions_T[order_T.view(self.cp, -1)[self.cp_group.rank()]]
            seen = zip(local.spread(positions_t[:, None]), whole.blocks, strict=True)
            visible = [torch.arange(longest, device=query.device) <= block[..., None] for block, (_, longest) in seen]
        blocks = zip(local.spread(query), whole.spread(key), whole.spread(value), visible, strict=True)
        # With grouped queries each key/value head serves as many neighbouring query heads.
        options = {"scale": self.softmax_scale, "enable_gqa": True}
        attended = [
            scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, **options) for q, k, v, mask in blocks
        ]
        return local.collect(attended).flatten(1)


_CPU = torch.device("cpu")  # indices are computed on the host, whatever torch's default device is

_LONGER, _SLACK = 1.5, 16


@dataclass(frozen=True)
class Rows:
    """Places of t packed tokens in blocks of rows [sequences, longest], R places in all. Padding has no gradient."""

    blocks: Sequence[tuple[int, int]]
    source_R: Tensor  # int64; padding has the last token of its sequence
    place_t: Tensor  # int64
    padding_R: Tensor

    def spread(self, packed: Tensor) -> list[Tensor]:
        """Maps [t, heads, …] to [sequences, heads, longest, …] of each block. Padding is arbitrary."""
        spread_R = _Spread.apply(packed, self.source_R, self.place_t)
        # splitting and joining one block would copy it
        parts = spread_R.split([count * longest for count, longest in self.blocks]) if len(self.blocks) > 1 else (spread_R,)
        return [part.unflatten(0, block).transpose(1, 2) for part, block in zip(parts, self.blocks, strict=True)]

    def collect(self, blocks: Sequence[Tensor]) -> Tensor:
        parts = [block.transpose(1, 2).flatten(0, 1) for block in blocks]
        parts_R = torch.cat(parts) if len(parts) > 1 else parts[0]
        return _Collect.apply(parts_R, self.source_R, self.place_t, self.padding_R)


def arrange(lengths: Sequence[int], order: Sequence[Sequence[int]], device: torch.device) -> Rows:
    lengths_S = torch.tensor(lengths, device=_CPU)
    offsets_S = lengths_S.cumsum(0) - lengths_S
    blocks, sources, paddings = [], [], []
    for numbers in order:
        longest = max(lengths[number] for number in numbers)
        members = torch.tensor(numbers, device=_CPU)
        position = torch.arange(longest, device=_CPU)
        last = lengths_S[members, None] - 1
        blocks.append((len(numbers), longest))
        sources.append((offsets_S[members, None] + torch.minimum(position, last)).flatten())
        paddings.append((position > last).flatten())
    source_R, padding_R = torch.cat(sources), torch.cat(paddings)
    places = (~padding_R).nonzero().squeeze(1)
    place_t = torch.empty_like(places)
    place_t[source_R[places]] = places
    return Rows(blocks, source_R.to(device), place_t.to(device), padding_R.to(device))


def like_lengths(lengths: Sequence[int]) -> list[list[int]]:
    blocks: list[list[int]] = []
    longest = 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if not blocks or longest > _LONGER * lengths[number] + _SLACK:
            blocks.append([])
            longest = lengths[number]
        blocks[-1].append(number)
    return blocks


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, source_R: Tensor, place_t: Tensor) -> Tensor:
        ctx.place_t = place_t
        return packed.index_select(0, source_R)

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None, None]:
        return grad_R.index_select(0, ctx.place_t), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spread_R: Tensor, source_R: Tensor, place_t: Tensor, padding_R: Tensor) -> Tensor:
        ctx.source_R, ctx.padding_R = source_R, padding_R
        return spread_R.index_select(0, place_t)

    @staticmethod
    def backward(ctx: Any, grad_t: Tensor) -> tuple[Tensor, None, None, None]:
        grad_R = grad_t.index_select(0, ctx.source_R)
        grad_R[ctx.padding_R] = 0
        return grad_R, None, None, None
