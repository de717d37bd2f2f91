"""From a plan to messages: what passes between two ranks, cut and packed to sizes that both derive from the same moves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_megatron.bridge.geometry import Region, ReshardPlan

STAGING_BYTES = 64 * 2**20
"""What a rank may hold of messages on their way, over all its peers, beyond its own shards."""

ALONE_BYTES = 256 * 2**10
"""Pieces from this size on travel alone, and need no copy where they are contiguous; smaller ones share a message."""

WINDOW = 2
"""Messages between two ranks that are under way at once: one travels while the next is packed or unpacked."""


@dataclass(frozen=True)
class End:
    """One rank's end of a move: ``region`` of its parameter ``param`` is exchanged with rank ``peer``.

    ``name`` is the destination's parameter, under which both ranks count and report.
    """

    peer: int
    name: str
    param: str
    region: Region


@dataclass(frozen=True)
class Piece:
    """A part of a move that travels in one message: boxes ``counts`` and, of each, rows ``rows`` (start, stop)."""

    end: End
    counts: tuple[int, int]
    rows: tuple[int, int]

    @property
    def numel(self) -> int:
        return (self.counts[1] - self.counts[0]) * (self.rows[1] - self.rows[0]) * math.prod(self.end.region.box.shape[1:])

    def view(self, param: Tensor) -> Tensor:
        """The piece within its parameter: [boxes, rows, …]."""
        return self.end.region.view(param)[slice(*self.counts), slice(*self.rows)]


Message = tuple[Piece, ...]
Queues = dict[int, list[Message]]


def numel_of(message: Message) -> int:
    """Elements of a message."""
    return sum(piece.numel for piece in message)


def largest_bytes(queue: Iterable[Message], itemsize: int) -> int:
    """The most that one message of a queue takes, or the digests (64 bits per tensor) that follow it."""
    messages = list(queue)
    names = {piece.end.name for message in messages for piece in message}
    return max(8 * len(names), *(numel_of(message) * itemsize for message in messages))


def source_ends(plan: ReshardPlan, source: int) -> list[End]:
    """What trainer rank ``source`` sends. In the transfer group the destinations' ranks follow the sources'."""
    return [
        End(plan.num_sources + move.destination, move.destination_param, move.source_param, move.source_region)
        for move in plan.sends(source)
    ]


def destination_ends(plan: ReshardPlan, destination: int) -> list[End]:
    """What destination rank ``destination`` receives."""
    return [
        End(move.source, move.destination_param, move.destination_param, move.destination_region)
        for move in plan.receives(destination)
    ]


def message_bytes(plan: ReshardPlan) -> int:
    """The size of a message that keeps every rank within STAGING_BYTES, but not less than ALONE_BYTES."""
    pairs = {(move.source, move.destination) for move in plan.moves}
    peers = Counter(("source", source) for source, _ in pairs) + Counter(("destination", to) for _, to in pairs)
    return max(ALONE_BYTES, STAGING_BYTES // (WINDOW * max(peers.values(), default=1)))


def queues(ends: Iterable[End], *, itemsize: int, limit: int) -> Queues:
    """Peer → its messages of at most ``limit`` bytes (or one row, where that is more), in the order of the moves.

    ``itemsize`` is that of the dtype on the wire. Both ends of a pair get the same sequence of sizes.
    """
    found: Queues = {}
    room: dict[int, int] = {}
    for end in ends:
        for piece in _pieces(end, limit // itemsize):
            size = piece.numel * itemsize
            queue = found.setdefault(end.peer, [])
            if size <= room.get(end.peer, 0):
                queue[-1] = (*queue[-1], piece)
                room[end.peer] -= size
            else:
                queue.append((piece,))
                room[end.peer] = 0 if size >= ALONE_BYTES else limit - size
    return found


def _pieces(end: End, limit: int) -> Iterator[Piece]:
    """Parts of at most ``limit`` elements: whole boxes where one fits, otherwise rows of one box."""
    rows = end.region.box.shape[0]
    row = math.prod(end.region.box.shape[1:])
    boxes_at_once = min(end.region.count, max(1, limit // (rows * row)))
    rows_at_once = rows if rows * row <= limit else max(1, limit // row)
    for box in range(0, end.region.count, boxes_at_once):
        for first in range(0, rows, rows_at_once):
            counts = (box, min(box + boxes_at_once, end.region.count))
            yield Piece(end, counts, (first, min(first + rows_at_once, rows)))


def wire_dtype(source: torch.dtype, destination: torch.dtype) -> torch.dtype:
    """The dtype in which weights travel: the smaller one; whichever side has the other converts."""
    return source if source.itemsize < destination.itemsize else destination
