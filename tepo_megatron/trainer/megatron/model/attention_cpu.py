"""Causal attention over packed sequences without Transformer Engine.

Megatron's own local attention refuses packed sequences. This one takes them in the same ``thd`` form that Transformer Engine
does, so that batches look alike on every platform. The sequences become right-padded rows (``model/rows.py``), for which plain
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

from tepo_megatron.trainer.megatron.batching.context_parallel import packed_order, rank_order
from tepo_megatron.trainer.megatron.model.rows import arrange, like_lengths


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

        t are the tokens of this context-parallel rank (``batching/context_parallel.py``), in the order of the micro-batch.
        """
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        order = like_lengths(lengths)
        whole = own = arrange(lengths, order, query.device)
        visible: list[Tensor | None] = [None] * len(order)
        if self.cp_group is not None:
            order_T = rank_order(packed_seq_params.cu_seqlens_q, self.cp)
            # backward: every rank's loss has a gradient for the keys and values of all, and they are summed
            both = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=self.cp_group)
            key, value = both[packed_order(order_T)].chunk(2, -1)
            own = arrange([length // self.cp for length in lengths], order, query.device)
            positions_T = torch.cat([torch.arange(length, device=query.device) for length in lengths])
            positions_t = positions_T[order_T.view(self.cp, -1)[self.cp_group.rank()]]
            seen = zip(own.spread(positions_t[:, None]), whole.blocks, strict=True)
            visible = [torch.arange(longest, device=query.device) <= block[..., None] for block, (_, longest) in seen]
        blocks = zip(own.spread(query), whole.spread(key), whole.spread(value), visible, strict=True)
        # With grouped queries each key/value head serves as many neighbouring query heads.
        options = {"scale": self.softmax_scale, "enable_gqa": True}
        attended = [
            scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, **options) for q, k, v, mask in blocks
        ]
        return own.collect(attended).flatten(1)
