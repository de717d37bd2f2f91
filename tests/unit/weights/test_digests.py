"""Digests of weights and of messages: equal however they are split, another as soon as one bit differs or lies elsewhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tepo_megatron.weights.geometry import Box, Shard
from tepo_megatron.weights.transfer import digests as module
from tepo_megatron.weights.transfer.digests import BLOCK_BYTES, TensorDigests, digest, fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn]


def of(**tensors: Tensor) -> int:
    boxes = {name: Box.whole(tensor.shape) for name, tensor in tensors.items()}
    return fingerprint([Shard(name, box, name, box) for name, box in boxes.items()], tensors)


@st.composite
def split_tensors(draw: st.DrawFn) -> tuple[Tensor, list[Box]]:
    """A tensor of one to three dimensions, and boxes that cover it once: a grid of uneven cuts."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    torch.manual_seed(draw(st.integers(0, 1000)))
    tensor = torch.randn(shape).to(draw(st.sampled_from(DTYPES)))
    boxes = [Box((), ())]
    for extent in shape:
        cuts = [0, *sorted(draw(st.sets(st.integers(1, extent), max_size=3)) - {extent}), extent]
        boxes = [Box((*box.start, a), (*box.stop, b)) for box in boxes for a, b in pairwise(cuts)]
    return tensor, boxes


@given(split_tensors())
def test_parts_add_up_to_the_whole(case: tuple[Tensor, list[Box]]) -> None:
    tensor, boxes = case
    total = 0
    for box in boxes:  # each part as a rank would hold it: a parameter of its own, behind a row of something else
        part = tensor[box.slices]
        param = torch.cat([torch.zeros_like(part[:1].float()), part.float()]).to(tensor.dtype)
        at = Box((1, *[0] * (part.ndim - 1)), (1 + part.shape[0], *part.shape[1:]))
        total += fingerprint([Shard("w", box, "p", at)], {"p": param})
    assert total % 2**64 == of(w=tensor)


@given(st.data())
def test_any_other_element_makes_another(data: st.DataObject) -> None:
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    at = data.draw(st.integers(0, 34))
    bit = data.draw(st.integers(0, 31))
    changed = tensor.clone()
    changed.view(torch.int32).view(-1)[at] ^= 1 << bit if bit < 31 else -(2**31)
    assert of(w=changed) != of(w=tensor)


def test_the_place_counts() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    swapped = a.clone()
    swapped[2, 3], swapped[3, 2] = a[3, 2], a[2, 3]
    others = [a, a.t().contiguous(), a.roll(1, 0), swapped, a.flip(1)]
    assert len({of(x=b, y=a), of(z=a, y=b), *(of(x=other, y=b) for other in others)}) == 7


def test_large_tensors_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(33, 17)
    expected = of(w=tensor)
    monkeypatch.setattr(module, "_CHUNK", 40)
    assert of(w=tensor) == expected


def test_it_is_the_same_in_all_versions() -> None:
    """Checkpoints and rollouts of earlier versions carry it."""
    assert of(w=torch.arange(12, dtype=torch.float32).view(3, 4)) == 0x34CD077FCF800000


# -- messages


@given(
    size=st.one_of(st.integers(1, 100), st.integers(BLOCK_BYTES - 9, BLOCK_BYTES + 9), st.just(3 * BLOCK_BYTES + 5)),
    data=st.data(),
)
def test_a_digest_depends_on_every_bit_and_on_the_size(size: int, data: st.DataObject) -> None:
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    before = digest(raw)
    assert before == digest(raw.clone())
    assert before == digest(torch.cat([raw.new_ones(3), raw])[3:])  # wherever it lies in memory
    at = data.draw(st.integers(0, size - 1))
    changed = raw.clone()
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(changed) != before
    assert digest(torch.cat([raw, raw.new_zeros(1)])) != before


def test_a_digest_depends_on_the_order_of_blocks() -> None:
    raw = torch.randint(-(2**62), 2**62, (4, BLOCK_BYTES // 8), generator=torch.Generator().manual_seed(0))
    assert digest(raw[[1, 0, 2, 3]]) != digest(raw)


def test_the_digests_of_a_tensor_depend_on_which_segment_came_first() -> None:
    first, second = TensorDigests(["a"]), TensorDigests(["a"])
    for one, other in ((3, 5), (5, 3)):
        first.add("a", torch.tensor(one))
        second.add("a", torch.tensor(other))
    assert first.differences(second.as_tensor())
    assert not first.differences(first.as_tensor())
