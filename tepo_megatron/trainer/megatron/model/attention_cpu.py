"""Causal attention over packed sequences (``thd``) without Transformer Engine.

Right-padding keeps plain causal attention exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tepo_megatron.trainer.megatron.parallel.batch import rank_order


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
        local = [length // self.cp for length in lengths]
        places: Sequence[Tensor] = ()
        if self.cp_group is not None:
            order_T = rank_order(packed_seq_params.cu_seqlens_q, self.cp)
            # backward: every rank's loss has a gradient for the keys and values of all, and they are summed
            both = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=self.cp_group)
            key, value = both[order_T.argsort()].chunk(2, -1)
            positions_T = torch.cat([torch.arange(length, device=query.device) for length in lengths])
            places = positions_T[order_T.view(self.cp, -1)[self.cp_group.rank()]][:, None].split(local)
        queries, keys, values = query.split(local), key.split(lengths), value.split(lengths)
        attended: dict[int, Tensor] = {}
        for members in _like_lengths(lengths):
            q, k, v = (_rows([parts[number] for number in members]) for parts in (queries, keys, values))
            visible = None
            if places:
                seen = _rows([places[number] for number in members])
                visible = torch.arange(k.size(2), device=query.device) <= seen[..., None]
            # With grouped queries each key/value head serves as many neighbouring query heads.
            options = {"scale": self.softmax_scale, "enable_gqa": True}
            rows = scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None, **options)
            sizes = [size for number in members for size in (local[number], rows.size(2) - local[number])]
            attended |= zip(members, rows.transpose(1, 2).flatten(0, 1).split(sizes)[::2], strict=True)
        return torch.cat([attended[number] for number in range(len(lengths))]).flatten(1)


def _rows(parts: Sequence[Tensor]) -> Tensor:
    """[length, heads, …] of sequences → [sequences, heads, longest, …]."""
    longest = max(part.size(0) for part in parts)
    padding = parts[0].new_zeros((longest, *parts[0].shape[1:]))
    joined = torch.cat([piece for part in parts for piece in (part, padding[part.size(0) :])])
    return joined.unflatten(0, (len(parts), longest)).transpose(1, 2)


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
