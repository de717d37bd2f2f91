"""Where parts of tensors lie, and which of them move: boxes, shards, layouts of ranks, plans. Pure values, no communication."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: ``start`` inclusive, ``stop`` exclusive, one entry per dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """What both cover, in the same coordinates, or None."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        """The same part, in the coordinates of a tensor whose first element is at ``origin`` here."""
        return Box(
            tuple(a - o for a, o in zip(self.start, origin, strict=True)),
            tuple(b - o for b, o in zip(self.stop, origin, strict=True)),
        )


@dataclass(frozen=True)
class Shard:
    """``box`` of the Hugging Face tensor ``tensor`` lies at ``at`` of a rank's parameter ``param``; both are of one shape."""

    tensor: str
    box: Box
    param: str
    at: Box


@dataclass(frozen=True)
class ShardLayout:
    """Which part of which Hugging Face tensor a rank holds.

    ``shapes`` names every tensor of the whole model, in the order in which it is streamed; ``shards`` what lies on this rank.
    ``params`` gives the full shape of each of this rank's parameters, with the rows that pad the vocabulary.
    """

    shapes: Mapping[str, tuple[int, ...]]
    shards: tuple[Shard, ...]
    params: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Region:
    """``count`` equal boxes of a tensor, each ``step`` rows (indices of dimension 0) after the one before it; none overlap."""

    box: Box
    count: int = 1
    step: int = 0

    @property
    def numel(self) -> int:
        return self.count * math.prod(self.box.shape)

    def view(self, tensor: Tensor) -> Tensor:
        """This part of ``tensor``, to read and write: [count, rows, …], the same shape for both regions of a ``Move``."""
        first, last = self.box.start[0], self.box.stop[0] + (self.count - 1) * self.step
        inner = tensor[(slice(first, last), *self.box.slices[1:])]
        # unfold appends the rows of a box as the last dimension.
        return inner.unfold(0, self.box.shape[0], max(self.step, 1)).movedim(-1, 1)


@dataclass(frozen=True)
class Move:
    """Elements of the Hugging Face tensor ``tensor`` that go from a parameter of a source rank to one of a destination rank.

    ``source`` and ``destination`` number ranks of two worlds. With the parameters of both sides at hand, a move is
    ``move.destination_region.view(theirs[move.destination_param]).copy_(move.source_region.view(ours[move.source_param]))``.
    """

    tensor: str
    source: int
    destination: int
    source_param: str
    source_region: Region
    destination_param: str
    destination_region: Region

    @property
    def numel(self) -> int:
        return self.source_region.numel


@dataclass(frozen=True)
class ReshardPlan:
    """Every move that takes a model from the source ranks to the destination ranks, in one order that all ranks share.

    A rank that does its own moves in the order of :meth:`sends` or :meth:`receives` cannot deadlock: of all moves that are
    left, the first one has both its ranks waiting for it. ``local`` maps a destination rank to the source rank that shares its
    device (or process), between which nothing is sent. ``digest`` names the inputs of the plan (hex SHA-256): ranks whose plans
    have the same digest agree on every move. Sizes are in elements; pass ``itemsize`` (bytes) to speak of bytes.
    """

    moves: tuple[Move, ...]
    num_sources: int
    num_destinations: int
    local: Mapping[int, int] = field(default_factory=dict)
    digest: str = ""

    def is_local(self, move: Move) -> bool:
        """Whether the two ranks of the move share a device, so that it is a copy."""
        return self.local.get(move.destination) == move.source

    def sends(self, source: int) -> tuple[Move, ...]:
        """What a source rank gives away, in order."""
        return tuple(move for move in self.moves if move.source == source)

    def receives(self, destination: int) -> tuple[Move, ...]:
        """What a destination rank gets, in order."""
        return tuple(move for move in self.moves if move.destination == destination)

    def bytes_between(self, itemsize: int, *, local: bool = False) -> dict[tuple[int, int], int]:
        """(source, destination) → bytes, of pairs that share no device; with ``local`` of those that do, instead."""
        total: dict[tuple[int, int], int] = {}
        for move in self.moves:
            if self.is_local(move) == local:
                pair = (move.source, move.destination)
                total[pair] = total.get(pair, 0) + move.numel * itemsize
        return total
