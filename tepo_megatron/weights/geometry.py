from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor


@dataclass(frozen=True)
class Box:
    """``start`` is inclusive, ``stop`` exclusive."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

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


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yields at most 2 · dimensions − 1 boxes of elements in row-major order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield Box((start,), (stop,))
        return
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if start == first * inner and stop == (last + 1) * inner:
        yield Box((first,) + (0,) * (len(shape) - 1), (last + 1, *shape[1:]))
    elif first == last:
        for box in boxes_of_range(shape[1:], start - first * inner, stop - first * inner):
            yield Box((first, *box.start), (first + 1, *box.stop))
    else:
        whole = -(-start // inner), stop // inner  # rows
        for begin, end in ((start, whole[0] * inner), (whole[0] * inner, whole[1] * inner), (whole[1] * inner, stop)):
            yield from boxes_of_range(shape, begin, end)


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
        return self.count * math.prod(self.box.shape)

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
    """All moves between ranks, in one order for all, so that they cannot deadlock.

    ``local``: destination rank → the source rank on the same device. Equal ``digest`` (hex SHA-256 of the inputs) means equal
    plans.
    """

    moves: tuple[Move, ...]
    num_sources: int
    num_destinations: int
    local: Mapping[int, int] = field(default_factory=dict)
    digest: str = ""

    def is_local(self, move: Move) -> bool:
        return self.local.get(move.destination) == move.source

    def sends(self, source: int) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if move.source == source)

    def receives(self, destination: int) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if move.destination == destination)

    def bytes_between(self, itemsize: int, *, local: bool = False) -> dict[tuple[int, int], int]:
        """Returns (source, destination) → bytes between different devices, or with ``local`` within one."""
        total: dict[tuple[int, int], int] = {}
        for move in self.moves:
            if self.is_local(move) == local:
                pair = (move.source, move.destination)
                total[pair] = total.get(pair, 0) + move.numel * itemsize
        return total


@lru_cache(maxsize=4096)
def overlaps(sources: tuple[Box, ...], destinations: tuple[Box, ...]) -> tuple[tuple[int, int, Box], ...]:
    """Returns (source index, destination index, common box). Cached: layers have the same boxes.

    Raises ValueError if sources overlap or leave gaps.
    """
    for i, j in overlapping_pairs(sources):
        raise ValueError(f"the parts {sources[i]} and {sources[j]} of one tensor overlap without being equal")
    result: list[tuple[int, int, Box]] = []
    for j, destination in enumerate(destinations):
        common = [(i, box) for i, source in enumerate(sources) if (box := source.intersection(destination)) is not None]
        # The sources are disjoint, so that the sizes of the intersections add up to what is covered.
        covered = sum(math.prod(box.shape) for _, box in common)
        if covered != math.prod(destination.shape):
            raise ValueError(
                f"the source ranks together hold {covered} of {math.prod(destination.shape)} elements of {destination}"
            )
        result += [(i, j, box) for i, box in common]
    return tuple(result)


def overlapping_pairs(boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    # Sweep by first row: once a box starts below the current one, so do all that follow in the order.
    order = sorted(range(len(boxes)), key=lambda i: boxes[i].start)
    for n, i in enumerate(order):
        for j in order[n + 1 :]:
            if boxes[j].start[0] >= boxes[i].stop[0]:
                break
            if boxes[i].intersection(boxes[j]) is not None:
                yield i, j


@lru_cache(maxsize=4096)
def coalesce(pairs: tuple[tuple[Box, Box], ...]) -> tuple[tuple[Region, Region], ...]:
    """Joins adjoining rows to one box, equal boxes at equal distances to one region."""
    merged: list[tuple[Box, Box]] = []
    for source, destination in sorted(pairs, key=lambda pair: pair[1].start):
        if merged and _adjoin(merged[-1][0], source) and _adjoin(merged[-1][1], destination):
            first = merged.pop()
            source, destination = Box(first[0].start, source.stop), Box(first[1].start, destination.stop)
        merged.append((source, destination))
    return tuple(regions for _, same in groupby(merged, key=_outline) for regions in _regions(list(same)))


def _adjoin(above: Box, below: Box) -> bool:
    return above.stop[0] == below.start[0] and above.start[1:] == below.start[1:] and above.stop[1:] == below.stop[1:]


def _outline(pair: tuple[Box, Box]) -> tuple[object, ...]:
    source, destination = pair
    return source.shape[0], source.start[1:], source.stop[1:], destination.start[1:], destination.stop[1:]


def _regions(pairs: Sequence[tuple[Box, Box]]) -> Iterator[tuple[Region, Region]]:
    starts = [(source.start[0], destination.start[0]) for source, destination in pairs]
    first = 0
    while first < len(pairs):
        end, step = first + 1, (0, 0)
        if end < len(pairs):
            step = (starts[end][0] - starts[first][0], starts[end][1] - starts[first][1])
            # Pairs are ordered by destination, so that the source may step back or overlap; then the pair stays alone.
            if min(step) >= pairs[first][0].shape[0]:
                while end < len(pairs) and (starts[end][0] - starts[end - 1][0], starts[end][1] - starts[end - 1][1]) == step:
                    end += 1
        count = end - first
        source, destination = pairs[first]
        yield (
            Region(source, count, step[0] if count > 1 else 0),
            Region(destination, count, step[1] if count > 1 else 0),
        )
        first = end
