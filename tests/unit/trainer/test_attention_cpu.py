"""Packed attention against its dense float64 twin under a block-causal mask."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from tepo_megatron.trainer.megatron.model.attention_cpu import PackedDotProductAttention, arrange, like_lengths

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


any_lengths = st.lists(st.integers(1, 200), min_size=1, max_size=12)


@given(any_lengths)
def test_tokens_come_back_from_their_places_and_padding_has_no_gradient(lengths: list[int]) -> None:
    rows = arrange(lengths, like_lengths(lengths), torch.device("cpu"))
    packed = torch.randn(sum(lengths), 2, 3, dtype=torch.float64, requires_grad=True)
    blocks = rows.spread(packed)
    assert [tuple(block.shape) for block in blocks] == [(count, 2, longest, 3) for count, longest in rows.blocks]
    assert torch.equal(rows.collect(blocks), packed)
    upstream = torch.randn_like(packed)
    rows.collect([block * 2 for block in blocks]).backward(upstream)
    assert torch.equal(packed.grad, 2 * upstream)  # padding repeats tokens, and none of them counts twice
    leaves = [block.detach().requires_grad_() for block in blocks]
    rows.collect(leaves).sum().backward()
    assert sum(int(leaf.grad.sum()) for leaf in leaves) == packed.numel()


@given(any_lengths)
def test_every_sequence_is_in_one_block_of_like_lengths(lengths: list[int]) -> None:
    blocks = like_lengths(lengths)
    assert sorted(number for block in blocks for number in block) == list(range(len(lengths)))
    for block in blocks:
        own = [lengths[number] for number in block]
        assert max(own) <= 1.5 * min(own) + 16
    shortest = [min(lengths[number] for number in block) for block in blocks]
    longest = [max(lengths[number] for number in block) for block in blocks]
    assert all(before > 1.5 * after + 16 for before, after in pairwise(longest))
    assert all(before >= after for before, after in zip(shortest, longest[1:], strict=False))
