"""Packs the moves of a plan into messages. Both ranks of a pair derive the same messages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tepo_megatron.weights.architecture import is_always_fp32
from tepo_megatron.weights.geometry import Box, Region, ReshardPlan

STAGING_BYTES = 64 * 2**20
"""Memory of a rank for messages under way, over all its peers."""

SINGLE_SEGMENT_BYTES = 256 * 2**10
"""From this size segments travel alone, without a copy if contiguous."""

_FP32_BYTES = 4

WINDOW = 2
"""Messages under way between two ranks: one travels while the next is packed or unpacked."""


@dataclass(frozen=True)
class MoveEnd:
    """``name`` is the destination's parameter, under which both ranks report.

    ``fp32``: both ends are fp32, whatever the dtype on the wire. Their bits travel unchanged, each element as ``units``
    elements of the wire's dtype; ``region`` counts these.
    """

    peer: int
    name: str
    param: str
    region: Region
    fp32: bool = False
    units: int = 1

    def on_wire(self, itemsize: int) -> MoveEnd:
        """Returns this end with a region in elements of ``itemsize`` bytes."""
        if not self.fp32 or itemsize >= _FP32_BYTES:
            return self
        units, box = _FP32_BYTES // itemsize, self.region.box
        wider = Box(tuple(units * index for index in box.start), tuple(units * index for index in box.stop))
        return replace(self, region=Region(wider, self.region.count, units * self.region.step), units=units)


@dataclass(frozen=True)
class MessageSegment:
    """``boxes`` and ``rows`` are (start, stop)."""

    end: MoveEnd
    boxes: tuple[int, int]
    rows: tuple[int, int]

    @property
    def numel(self) -> int:
        return (self.boxes[1] - self.boxes[0]) * (self.rows[1] - self.rows[0]) * math.prod(self.end.region.box.shape[1:])

    def view(self, param: Tensor, wire: torch.dtype) -> Tensor:
        """Returns a view [boxes, rows, …], in ``wire`` if bits travel unchanged."""
        if self.end.units > 1:
            param = param.view(wire)
        return self.end.region.view(param)[slice(*self.boxes), slice(*self.rows)]


WireMessage = tuple[MessageSegment, ...]
Queues = dict[int, list[WireMessage]]


def numel_of(message: WireMessage) -> int:
    return sum(segment.numel for segment in message)


def message_sizes(queue: Iterable[WireMessage], itemsize: int) -> tuple[int, ...]:
    """Returns the bytes of each message and, last, of the digests: 64 bits per tensor."""
    messages = list(queue)
    names = {segment.end.name for message in messages for segment in message}
    return (*(numel_of(message) * itemsize for message in messages), 8 * len(names))


def source_ends(plan: ReshardPlan, source: int) -> list[MoveEnd]:
    """Destinations follow the sources in the transfer group's ranks."""
    return [
        MoveEnd(
            plan.num_sources + move.destination,
            move.destination_param,
            move.source_param,
            move.source_region,
            fp32=is_always_fp32(move.tensor),
        )
        for move in plan.sends(source)
    ]


def destination_ends(plan: ReshardPlan, destination: int) -> list[MoveEnd]:
    return [
        MoveEnd(
            move.source,
            move.destination_param,
            move.destination_param,
            move.destination_region,
            fp32=is_always_fp32(move.tensor),
        )
        for move in plan.receives(destination)
    ]


def message_bytes(plan: ReshardPlan) -> int:
    """Returns the message size that keeps every rank within STAGING_BYTES, at least SINGLE_SEGMENT_BYTES."""
    pairs = {(move.source, move.destination) for move in plan.moves}
    peers = Counter(("source", source) for source, _ in pairs) + Counter(("destination", to) for _, to in pairs)
    return max(SINGLE_SEGMENT_BYTES, STAGING_BYTES // (WINDOW * max(peers.values(), default=1)))


def queues(ends: Iterable[MoveEnd], *, itemsize: int, limit: int) -> Queues:
    """Packs moves, in order, into messages of at most ``limit`` bytes, or one row; ``itemsize`` is on the wire."""
    result: Queues = {}
    room: dict[int, int] = {}  # bytes that still fit into the last message to a peer
    for end in ends:
        for segment in _segments(end.on_wire(itemsize), limit // itemsize):
            size = segment.numel * itemsize
            queue = result.setdefault(end.peer, [])
            if size <= room.get(end.peer, 0):
                queue[-1] = (*queue[-1], segment)
                room[end.peer] -= size
            else:
                queue.append((segment,))
                # A large segment travels alone: to share a message costs a copy into a buffer.
                room[end.peer] = 0 if size >= SINGLE_SEGMENT_BYTES else limit - size
    return result


def _segments(end: MoveEnd, limit: int) -> Iterator[MessageSegment]:
    rows = end.region.box.shape[0]
    row = math.prod(end.region.box.shape[1:])
    boxes_at_once = min(end.region.count, max(1, limit // (rows * row)))
    rows_at_once = rows if rows * row <= limit else max(1, limit // row)
    for box in range(0, end.region.count, boxes_at_once):
        for first in range(0, rows, rows_at_once):
            boxes = (box, min(box + boxes_at_once, end.region.count))
            yield MessageSegment(end, boxes, (first, min(first + rows_at_once, rows)))


def wire_dtype(source: torch.dtype, destination: torch.dtype) -> torch.dtype:
    """Returns the smaller dtype; the other side converts."""
    return source if source.itemsize < destination.itemsize else destination
