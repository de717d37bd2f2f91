"""Packed sequences as blocks of rows: nothing is lost, no gradient is added, and little is padded."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.trainer.megatron.model.attention_cpu import arrange, like_lengths

lengths_of = st.lists(st.integers(1, 200), min_size=1, max_size=12)


@given(lengths_of)
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


@given(lengths_of)
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
