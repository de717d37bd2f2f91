"""Causal attention over packed sequences without Transformer Engine.

Megatron's own local attention refuses packed sequences. This one takes them in the same ``thd`` form that Transformer Engine
does, so that batches look alike on every platform. The sequences become right-padded rows, for which plain
causal attention is already exact: no query sees a later key, so none sees padding or another sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class PackedDotProductAttention(torch.nn.Module):
    """A ``core_attention`` for Megatron's SelfAttention: block-causal attention without parameters and without dropout."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str, **_: Any
    ) -> None:
        super().__init__()
        self.softmax_scale = config.softmax_scale

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
        """Attends within each sequence: query [T, heads, d], key and value [T, key/value heads, d] → [T, heads · d]."""
        lengths = packed_seq_params.cu_seqlens_q.diff().long()
        longest = packed_seq_params.max_seqlen_q
        present = torch.arange(longest, device=lengths.device) < lengths[:, None]
        # With grouped queries each key/value head serves this many neighbouring query heads.
        repeats = query.size(1) // key.size(1)

        def rows(packed: Tensor, repeat: int = 1) -> Tensor:
            padded = packed.new_zeros(present.shape + packed.shape[1:])
            padded[present] = packed
            return padded.transpose(1, 2).repeat_interleave(repeat, dim=1)

        attended = scaled_dot_product_attention(
            rows(query), rows(key, repeats), rows(value, repeats), is_causal=True, scale=self.softmax_scale
        )
        return attended.transpose(1, 2)[present].flatten(1)
