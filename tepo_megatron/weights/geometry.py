from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Box:
    """``start`` is inclusive, ``stop`` exclusive."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersection(self, other: Box) -> Box | None:
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        return Box(
            tuple(a - o for a, o in zip(self.start, origin, strict=True)),
            tuple(b - o for b, o in zip(self.stop, origin, strict=True)),
        )

    @classmethod
    def of_range(cls, shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
        """Yields at most 2 · dimensions − 1 boxes of row-major elements."""
        if start >= stop:
            return
        inner = math.prod(shape[1:])
        first, last = start // inner, (stop - 1) // inner
        if start == first * inner and stop == (last + 1) * inner:
            yield cls((first,) + (0,) * (len(shape) - 1), (last + 1, *shape[1:]))
        elif first == last:
            for box in cls.of_range(shape[1:], start - first * inner, stop - first * inner):
                yield cls((first, *box.start), (first + 1, *box.stop))
        else:
            whole = -(-start // inner), stop // inner  # rows
            for begin, end in ((start, whole[0] * inner), (whole[0] * inner, whole[1] * inner), (whole[1] * inner, stop)):
                yield from cls.of_range(shape, begin, end)


@dataclass(frozen=True)
class Shard:
    """``box`` of the Hugging Face tensor is at ``param_box`` of a rank's parameter."""

    tensor: str
    box: Box
    param: str
    param_box: Box


@dataclass(frozen=True)
class ShardLayout:
    """``shapes``: all tensors, in streaming order; ``params``: this rank's, with padding."""

    shapes: Mapping[str, tuple[int, ...]]
    shards: tuple[Shard, ...]
    params: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Region:
    """``count`` boxes of one shape, each ``step`` rows (dimension 0) after the previous one."""

    box: Box
    count: int = 1
    step: int = 0

    @property
    def numel(self) -> int:
        return self.count * self.box.numel

    def view(self, tensor: Tensor) -> Tensor:
        """Returns a writable view [count, rows, …]."""
        first, last = self.box.start[0], self.box.stop[0] + (self.count - 1) * self.step
        inner = tensor[(slice(first, last), *self.box.slices[1:])]
        # unfold gives windows of rows at equal distances as a view, without a copy: window n is box n. It puts the rows of a
        # window into a new last dimension. It refuses a step of 0, which a single box has; with one window any step will do.
        return inner.unfold(0, self.box.shape[0], max(self.step, 1)).movedim(-1, 1)


@dataclass(frozen=True)
class Move:
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
    """Moves are in one order for all ranks, so that they cannot deadlock.

    ``local``: destination rank → source rank on the same device. ``digest``: hex SHA-256 of the inputs.
    """

    moves: tuple[Move, ...]
    num_sources: int
    num_destinations: int
    local: Mapping[int, int] = field(default_factory=dict)
    digest: str = ""

    @property
    def world_size(self) -> int:
        return self.num_sources + self.num_destinations

    def is_local(self, move: Move) -> bool:
        return self.local.get(move.destination) == move.source

    def sends(self, source: int) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if move.source == source)

    def receives(self, destination: int) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if move.destination == destination)

    def bytes_between(self, itemsize: int, *, local: bool = False) -> Counter[tuple[int, int]]:
        """Returns (source, destination) → bytes between devices, or with ``local`` within one."""
        total = Counter[tuple[int, int]]()
        for move in self.moves:
            if self.is_local(move) == local:
                total[move.source, move.destination] += move.numel * itemsize
        return total
