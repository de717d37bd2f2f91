"""Causal attention over packed sequences without Transformer Engine.

Megatron's own local attention refuses packed sequences. This one takes them in the same ``thd`` form that Transformer Engine
does, so that batches look alike on every platform. The sequences become right-padded rows, for which plain
causal attention is already exact: no query sees a later key, so none sees padding or another sequence. Under context
parallelism keys and values of all ranks are gathered, and a rank's queries see those up to their own positions.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tepo_megatron.engine.context_parallel import packed_order, rank_order


class PackedDotProductAttention(torch.nn.Module):
    """A ``core_attention`` for Megatron's SelfAttention: block-causal attention without parameters and without dropout."""

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
        """Attends within each sequence: query [t, heads, d], key and value [t, key/value heads, d] → [t, heads · d].

        t are the tokens of this context-parallel rank (``engine/context_parallel.py``), in the order of the micro-batch.
        """
        lengths_S, longest = packed_seq_params.cu_seqlens_q.diff().long(), packed_seq_params.max_seqlen_q
        present_SK = present_SQ = _present(lengths_S, longest)
        visible = None
        if self.cp_group is not None:
            order_T = rank_order(packed_seq_params.cu_seqlens_q, self.cp)
            # backward: every rank's loss has a gradient for the keys and values of all, and they are summed
            both = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=self.cp_group)
            key, value = both[packed_order(order_T)].chunk(2, -1)
            present_SQ = _present(lengths_S // self.cp, longest // self.cp)
            places_K = torch.arange(longest, device=order_T.device)
            positions_t = places_K.expand_as(present_SK)[present_SK][order_T.view(self.cp, -1)[self.cp_group.rank()]]
            visible = places_K <= _rows(positions_t[:, None], present_SQ)[..., None]
        # With grouped queries each key/value head serves this many neighbouring query heads.
        repeats = query.size(1) // key.size(1)
        attended = scaled_dot_product_attention(
            _rows(query, present_SQ),
            _rows(key, present_SK).repeat_interleave(repeats, dim=1),
            _rows(value, present_SK).repeat_interleave(repeats, dim=1),
            attn_mask=visible,
            is_causal=visible is None,
            scale=self.softmax_scale,
        )
        return attended.transpose(1, 2)[present_SQ].flatten(1)


def _present(lengths_S: Tensor, longest: int) -> Tensor:
    """Where rows of ``longest`` places have tokens: bool [S, longest]."""
    return torch.arange(longest, device=lengths_S.device) < lengths_S[:, None]


def _rows(packed: Tensor, present_SL: Tensor) -> Tensor:
    """Packed [t, heads, …] as rows [S, heads, L, …], 0 where there is no token."""
    padded = packed.new_zeros(present_SL.shape + packed.shape[1:])
    padded[present_SL] = packed
    return padded.transpose(1, 2)
