"""Packed attention against its dense float64 twin under a block-causal mask."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from tepo_megatron.trainer.megatron.model.attention_cpu import PackedDotProductAttention

lengths_of = st.lists(st.integers(1, 9) | st.integers(30, 60), min_size=1, max_size=6)
"""Short and long ones come into blocks of their own."""


def block_causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """[T, heads, d] in float64, every query over the earlier keys of its own sequence."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(sum(lengths))
    allowed = (sequence[:, None] == sequence) & (position[:, None] >= position)
    repeats = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.size(-1) ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), value).flatten(1)


@settings(deadline=None, max_examples=30)
@given(
    lengths_of,
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 2**31),
)
def test_attention_and_gradients_match_the_block_causal_oracle(
    lengths: list[int], repeats: int, groups: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens, dim = sum(lengths), 4
    shapes = [(tokens, groups * repeats, dim), (tokens, groups, dim), (tokens, groups, dim)]
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    single = [tensor.detach().float().requires_grad_() for tensor in exact]
    upstream = torch.randn(tokens, groups * repeats * dim, generator=generator, dtype=torch.float64)

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    packed = PackedSeqParams("thd", offsets, offsets, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    attention = PackedDotProductAttention(config, 1, AttnMaskType.causal, "self")
    out = attention(*single, None, packed_seq_params=packed)
    expected = block_causal(exact[0], exact[1], exact[2], lengths)

    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    out.backward(upstream.float())
    expected.backward(upstream)
    for ours, oracle in zip(single, exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), oracle.grad, atol=1e-5, rtol=1e-5)
