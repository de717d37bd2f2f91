from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
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

    @staticmethod
    def overlaps(boxes: Iterable[Box]) -> Iterator[tuple[Box, Box]]:
        # Sweep by first row: once a box starts below the current one, so do all that follow in the order.
        order = sorted(boxes, key=lambda box: box.start)
        for n, box in enumerate(order):
            for other in order[n + 1 :]:
                if other.start[0] >= box.stop[0]:
                    break
                if box.intersection(other) is not None:
                    yield box, other

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


@lru_cache(maxsize=4096)
def _translate(box: Box, origin: tuple[int, ...], target: tuple[int, ...]) -> Box:
    """Cached: layers have the same boxes."""
    return box.relative_to(tuple(a - b for a, b in zip(origin, target, strict=True)))


@dataclass(frozen=True)
class Shard:
    """``box`` of the Hugging Face tensor is at ``param_box`` of a rank's parameter."""

    tensor: str
    box: Box
    param: str
    param_box: Box

    def in_param(self, box: Box) -> Box:
        return _translate(box, self.box.start, self.param_box.start)


@dataclass(frozen=True)
class ShardLayout:
    """``shapes``: all tensors, in streaming order; ``params``: this rank's, with padding."""

    shapes: Mapping[str, tuple[int, ...]]
    shards: tuple[Shard, ...]
    params: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def by_tensor(self, tensors: Collection[str]) -> dict[str, list[Shard]]:
        result: dict[str, list[Shard]] = {}
        for shard in self.shards:
            if shard.tensor in tensors:
                result.setdefault(shard.tensor, []).append(shard)
        return result


@dataclass(frozen=True)
class Region:
    """``count`` boxes of one shape, each ``step`` rows (dimension 0) after the previous one."""

    box: Box
    count: int = 1
    step: int = 0

    @property
    def numel(self) -> int:
        return self.count * self.box.numel

    def boxes(self) -> Iterator[Box]:
        (first, *start), (last, *stop) = self.box.start, self.box.stop
        for shift in range(0, self.count * self.step or 1, self.step or 1):
            yield Box((first + shift, *start), (last + shift, *stop))

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

    def receives(self, destination: int) -> Sequence[Move]:
        return self._received.get(destination, ())

    @cached_property
    def _received(self) -> dict[int, list[Move]]:
        result: dict[int, list[Move]] = {}
        for move in self.moves:
            result.setdefault(move.destination, []).append(move)
        return result

    def bytes_between(self, itemsize: int, *, local: bool = False) -> Counter[tuple[int, int]]:
        """Returns (source, destination) → bytes between devices, or with ``local`` within one."""
        total = Counter[tuple[int, int]]()
        for move in self.moves:
            if self.is_local(move) == local:
                total[move.source, move.destination] += move.numel * itemsize
        return total

    def prove(self, sources: Sequence[ShardLayout], destinations: Sequence[ShardLayout]) -> None:
        """Raises RuntimeError unless every destination's element is written once, from its place in the source."""
        of_sources, of_destinations = _places_by_param(sources), _places_by_param(destinations)
        written: dict[tuple[int, str], list[Box]] = defaultdict(list)
        proved: dict[tuple[object, ...], list[Box]] = {}  # layers, copies and servers have equal cases
        for move in self.moves:
            of_source = of_sources[move.source, move.source_param].get(move.tensor, ())
            of_destination = of_destinations[move.destination, move.destination_param].get(move.tensor, ())
            case = move.source_region, move.destination_region, of_source, of_destination
            if (boxes := proved.get(case)) is None:
                boxes = proved[case] = list(move.destination_region.boxes())
                for source_box, destination_box in zip(move.source_region.boxes(), boxes, strict=True):
                    sent, needed = _in_tensor(source_box, of_source), _in_tensor(destination_box, of_destination)
                    if sent is None or sent != needed:
                        raise RuntimeError(
                            f"the move of {move.tensor} from {move.source_param} of source rank {move.source} to "
                            f"{move.destination_param} of destination rank {move.destination} takes {sent} to where {needed} "
                            "belongs; make the plan again"
                        )
            written[move.destination, move.destination_param] += boxes
        for (rank, param), tensors in of_destinations.items():
            needed_boxes = tuple(box for places in tensors.values() for box, _ in places)
            if problem := _find_problem(tuple(written[rank, param]), needed_boxes):
                raise RuntimeError(f"the plan writes {problem} of {param} on destination rank {rank}; make the plan again")


_Places = tuple[tuple[Box, Box], ...]
"""A tensor's shards in one parameter: (box of the parameter, box of the tensor)."""


def _places_by_param(layouts: Sequence[ShardLayout]) -> dict[tuple[int, str], dict[str, _Places]]:
    places: dict[tuple[int, str], dict[str, _Places]] = defaultdict(dict)
    for rank, layout in enumerate(layouts):
        for shard in layout.shards:
            by_tensor = places[rank, shard.param]
            by_tensor[shard.tensor] = (*by_tensor.get(shard.tensor, ()), (shard.param_box, shard.box))
    return places


def _in_tensor(box: Box, places: _Places) -> Box | None:
    for in_param, in_tensor in places:
        if in_param.intersection(box) == box:
            return _translate(box, in_param.start, in_tensor.start)
    return None


@lru_cache(maxsize=4096)
def _find_problem(written: tuple[Box, ...], needed: tuple[Box, ...]) -> str:
    for one, other in Box.overlaps(written):
        return f"{one} and {other}, which overlap,"
    # Disjoint boxes within the needed ones cover them if and only if they have as many elements.
    written_numel, needed_numel = (sum(box.numel for box in boxes) for boxes in (written, needed))
    return "" if written_numel == needed_numel else f"{written_numel} of {needed_numel} elements"
