"""Packed sequences as right-padded rows, for attention without Transformer Engine.

Sequences of like lengths share a block of rows, so that short ones are not padded to the longest. Tokens are copied by index
in both directions, also backward: a token stands in one place, and padding has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CPU = torch.device("cpu")  # which tokens go where is found out there, whatever torch's default device is

_LONGER, _SLACK = 1.5, 16
"""A block's longest row has at most so many times its shortest's tokens, and so many more: a block costs a few calls."""


@dataclass(frozen=True)
class Rows:
    """Where the t tokens of packed sequences stand in blocks of rows, R places in all. A block is [sequences, longest]."""

    blocks: Sequence[tuple[int, int]]
    source_R: Tensor
    """int64: the token at each place; padding has the last token of its sequence."""

    place_t: Tensor
    """int64: the place of each token."""

    padding_R: Tensor
    """bool"""

    def spread(self, packed: Tensor) -> list[Tensor]:
        """Packed [t, heads, …] → for each block [sequences, heads, longest, …]. What padding holds is any token's."""
        spread_R = _Spread.apply(packed, self.source_R, self.place_t)
        # one block is taken as it is: splitting and joining would copy it backward and forward
        parts = spread_R.split([count * longest for count, longest in self.blocks]) if len(self.blocks) > 1 else (spread_R,)
        return [part.unflatten(0, block).transpose(1, 2) for part, block in zip(parts, self.blocks, strict=True)]

    def collect(self, blocks: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`spread`. Padding gets gradient 0."""
        parts = [block.transpose(1, 2).flatten(0, 1) for block in blocks]
        parts_R = torch.cat(parts) if len(parts) > 1 else parts[0]
        return _Collect.apply(parts_R, self.source_R, self.place_t, self.padding_R)


def arrange(lengths: Sequence[int], order: Sequence[Sequence[int]], device: torch.device) -> Rows:
    """Arranges packed sequences of these lengths in blocks; ``order`` has the numbers of each block's sequences."""
    lengths_S = torch.tensor(lengths, device=_CPU)
    offsets_S = lengths_S.cumsum(0) - lengths_S
    blocks, sources, paddings = [], [], []
    for numbers in order:
        longest = max(lengths[number] for number in numbers)
        members = torch.tensor(numbers, device=_CPU)
        at = torch.arange(longest, device=_CPU)
        last = lengths_S[members, None] - 1
        blocks.append((len(numbers), longest))
        sources.append((offsets_S[members, None] + torch.minimum(at, last)).flatten())
        paddings.append((at > last).flatten())
    source_R, padding_R = torch.cat(sources), torch.cat(paddings)
    places = (~padding_R).nonzero().squeeze(1)
    place_t = torch.empty_like(places)
    place_t[source_R[places]] = places
    return Rows(blocks, source_R.to(device), place_t.to(device), padding_R.to(device))


def like_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Divides sequences, given by their lengths, into blocks of like ones; returns their numbers, the longest first."""
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
