"""Sends every part of a tensor straight to the ranks that need it.

Message n of every peer is in round n, digests in the last; a rank starts up to WINDOW rounds ahead. No deadlock: in the lowest
unfinished round every rank has started its messages, or will without waiting.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Literal

import torch
from torch import Tensor

from tepo_megatron.weights.architecture import is_always_fp32
from tepo_megatron.weights.geometry import Box, Region, ReshardPlan
from tepo_megatron.weights.transfer.digests import TensorDigests, digest
from tepo_megatron.weights.transfer.transport import TransferError, TransferGroup, TransportSpec

_MAX_NAMED = 8

NOT_AS_SENT = "did not arrive as they were sent"

_Direction = Literal["sending", "receiving"]

_LARGEST_MESSAGE = 64 * 2**20  # more would only delay what is packed or unpacked meanwhile

SINGLE_SEGMENT_BYTES = 256 * 2**10
"""From this size segments travel alone between host memories, without a copy if contiguous."""

WINDOW = 2
"""One message travels while the next is packed or unpacked."""


@dataclass(frozen=True)
class MoveEnd:
    """``name`` is the destination's parameter.

    ``fp32``: both ends are fp32; an element travels as ``units`` of the wire's, which ``region`` counts.
    """

    peer: int
    name: str
    param: str
    region: Region
    fp32: bool = False
    units: int = 1

    @classmethod
    def of(cls, plan: ReshardPlan, rank: int) -> list[MoveEnd]:
        """``rank`` is the transfer group's, in which destinations follow sources."""
        destination = rank - plan.num_sources
        if destination >= 0:
            names = ((move, move.destination_param) for move in plan.receives(destination))
            return [cls(move.source, name, name, move.destination_region, is_always_fp32(move.tensor)) for move, name in names]
        return [
            cls(
                plan.num_sources + move.destination,
                move.destination_param,
                move.source_param,
                move.source_region,
                is_always_fp32(move.tensor),
            )
            for move in plan.moves
            if move.source == rank
        ]

    def on_wire(self, itemsize: int) -> MoveEnd:
        if not self.fp32 or itemsize >= torch.float32.itemsize:
            return self
        units, box = torch.float32.itemsize // itemsize, self.region.box
        wider = Box(tuple(units * index for index in box.start), tuple(units * index for index in box.stop))
        return replace(self, region=Region(wider, self.region.count, units * self.region.step), units=units)


@dataclass(frozen=True)
class _MessageSegment:
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


_WireMessage = tuple[_MessageSegment, ...]
Queues = dict[int, list[_WireMessage]]


def numel_of(message: _WireMessage) -> int:
    return sum(segment.numel for segment in message)


def message_sizes(messages: Sequence[_WireMessage], itemsize: int) -> tuple[int, ...]:
    """The last size is the digests'."""
    names = {segment.end.name for message in messages for segment in message}
    return (*(numel_of(message) * itemsize for message in messages), 8 * len(names))


def message_limits(plan: ReshardPlan, transport: TransportSpec) -> tuple[int, int]:
    """Returns ``limit`` and ``alone`` for ``queues``."""
    pairs = {(move.source, move.destination) for move in plan.moves}
    peers = Counter(("source", source) for source, _ in pairs) + Counter(("destination", to) for _, to in pairs)
    staging_bytes = transport.staging_bytes // (WINDOW * max(peers.values(), default=1))
    limit = max(SINGLE_SEGMENT_BYTES, min(_LARGEST_MESSAGE, staging_bytes))
    return limit, limit if transport.fills else SINGLE_SEGMENT_BYTES


def count_messages(plan: ReshardPlan, rank: int, itemsize: int, transport: TransportSpec) -> tuple[int, int]:
    """Returns the messages of a rank's update, without digests, and the rounds that they take."""
    limit, alone = message_limits(plan, transport)
    lengths = [len(queue) for queue in queues(MoveEnd.of(plan, rank), itemsize=itemsize, limit=limit, alone=alone).values()]
    return sum(lengths), max(lengths, default=0)


def queues(ends: Iterable[MoveEnd], *, itemsize: int, limit: int, alone: int = SINGLE_SEGMENT_BYTES) -> Queues:
    """Each message has at most ``limit`` bytes, or one row; ``itemsize`` is the wire's.

    Segments from ``alone`` bytes share no message.
    """
    result: Queues = {}
    room: dict[int, int] = {}  # elements that still fit into the last message to a peer
    most, alone = limit // itemsize, alone // itemsize
    for end in ends:
        for segment in _segments(end.on_wire(itemsize), most, room.get(end.peer, 0) if most <= alone else 0):
            queue = result.setdefault(end.peer, [])
            if segment.numel <= room.get(end.peer, 0):
                queue[-1] = (*queue[-1], segment)
                room[end.peer] -= segment.numel
            else:
                queue.append((segment,))
                room[end.peer] = 0 if segment.numel >= alone else most - segment.numel
    # A tensor's segments are next to each other, so that one digest covers them.
    return {peer: [tuple(sorted(message, key=_name)) for message in queue] for peer, queue in result.items()}


def _name(segment: _MessageSegment) -> str:
    return segment.end.name


def _param(segment: _MessageSegment) -> str:
    return segment.end.param


def _segments(end: MoveEnd, limit: int, room: int) -> Iterator[_MessageSegment]:
    rows, row = end.region.box.shape[0], math.prod(end.region.box.shape[1:])
    box = first = 0
    size = room if room >= min(end.region.numel, max(row, limit // 16)) else limit
    while box < end.region.count:
        if not first and rows * row <= size:
            boxes, last = min(end.region.count, box + size // (rows * row)), rows
        else:
            boxes, last = box + 1, min(rows, first + max(1, size // row))
        yield _MessageSegment(end, (box, boxes), (first, last))
        box, first, size = (boxes, 0, limit) if last == rows else (box, last, limit)


def wire_dtype(source: torch.dtype, destination: torch.dtype) -> torch.dtype:
    """Returns the smaller dtype; the other side converts."""
    return source if source.itemsize < destination.itemsize else destination


def send(transport: TransferGroup, outgoing: Queues, params: Mapping[str, Tensor], wire: torch.dtype) -> None:
    """Returns when the peers have all messages. Raises TransferError naming tensors and peer."""
    exchange = _Exchange("sending", transport, outgoing, params, wire)
    rounds = max(exchange.rounds, transport.rounds)
    for number in range(rounds + WINDOW):
        # Message number - WINDOW used the same buffer.
        for peer, _ in exchange.messages(number - WINDOW):
            exchange.wait(peer, number - WINDOW)
        packed = {peer: exchange.pack(message, peer, number) for peer, message in exchange.messages(number)}
        if number < rounds:
            exchange.start(packed, number)
        for peer, data in packed.items():  # digests are computed while the messages travel
            exchange.add_digests(peer, number, data)
    exchange.start({peer: digests.as_tensor().to(transport.device(peer)) for peer, digests in exchange.digests.items()})
    for peer in outgoing:
        exchange.wait(peer)


def receive(
    transport: TransferGroup,
    incoming: Queues,
    params: Mapping[str, Tensor],
    wire: torch.dtype,
    complete: Callable[[str], None] = lambda _: None,
) -> dict[int, Tensor]:
    """Calls ``complete(name)`` for each complete parameter. Returns the peers' digests, for ``changed_since``.

    Raises RuntimeError with a failed message's tensors and peer, or tensors with another digest.
    """
    exchange = _Exchange("receiving", transport, incoming, params, wire)
    missing: Counter[str] = Counter()
    for segment in chain.from_iterable(message for queue in incoming.values() for message in queue):
        missing[segment.end.name] += segment.numel
    arriving: dict[int, dict[int, Tensor]] = {}
    for number in range(-WINDOW, exchange.rounds):  # below 0 there is nothing to wait for, only messages to start
        for peer, message in exchange.messages(number):
            exchange.wait(peer, number)
            data = arriving[number].pop(peer)
            exchange.add_digests(peer, number, data)
            for name in _unpack(message, data, params, missing):
                complete(name)
        ahead = number + WINDOW
        arriving[ahead] = {peer: exchange.buffer(message, peer, ahead) for peer, message in exchange.messages(ahead)}
        exchange.start(arriving[ahead], ahead)
    return exchange.compare_digests()


def changed_since(
    digests: Mapping[int, Tensor], incoming: Queues, params: Mapping[str, Tensor], wire: torch.dtype
) -> list[str]:
    """Returns the names in ``params`` whose values are no longer those that ``receive`` has written."""
    changed: dict[str, None] = {}
    nothing = torch.zeros((), dtype=torch.int64, device=next(iter(params.values()), torch.empty(0)).device)
    for peer, queue in incoming.items():
        current = TensorDigests(segment.end.name for message in queue for segment in message)
        for message in queue:
            for name, segments in groupby(message, key=_name):
                parts = [segment.view(params[name], wire).to(wire).flatten() for segment in segments if name in params]
                current.add(name, digest(torch.cat(parts)) if parts else nothing)
        changed |= dict.fromkeys(name for name in current.different(digests[peer]) if name in params)
    return list(changed)


class _Exchange:
    def __init__(
        self, direction: _Direction, transport: TransferGroup, queues: Queues, params: Mapping[str, Tensor], wire: torch.dtype
    ) -> None:
        self._direction, self._transport, self._queues = direction, transport, queues
        self._params, self._wire = params, wire
        self._devices = {peer: transport.device(peer) for peer in queues}
        self._largest = {peer: max(map(numel_of, queue)) for peer, queue in queues.items()}
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._computed: dict[tuple[object, ...], Tensor] = {}
        self._held: dict[tuple[int, str], Tensor] = {}
        self._unsent = {peer: Counter(_param(segment) for segment in chain(*queue)) for peer, queue in queues.items()}
        self.rounds = max((len(queue) for queue in queues.values()), default=0)
        self.digests = {
            peer: TensorDigests(segment.end.name for message in queue for segment in message) for peer, queue in queues.items()
        }

    def messages(self, number: int) -> Iterator[tuple[int, _WireMessage]]:
        return ((peer, queue[number]) for peer, queue in self._queues.items() if 0 <= number < len(queue))

    def start(self, data: Mapping[int, Tensor], number: int | None = None) -> None:
        """``number`` None stands for the digests, also below."""
        if not data and not self._transport.rounds:
            return
        start = self._transport.send if self._direction == "sending" else self._transport.receive
        try:
            with self._transport.round():
                for peer, tensor in data.items():
                    with self._naming_tensors(peer, number):
                        start(tensor, peer, len(self._queues[peer]) if number is None else number)
        except RuntimeError as error:  # of the round, which names no tensors
            raise TransferError(str(error)) from error

    def wait(self, peer: int, number: int | None = None) -> None:
        with self._naming_tensors(peer, number):
            self._transport.wait(peer, len(self._queues[peer]) if number is None else number)

    @contextmanager
    def _naming_tensors(self, peer: int, number: int | None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            message = () if number is None else self._queues[peer][number]
            what = ", ".join(dict.fromkeys(repr(segment.end.name) for segment in message)) or "the digests"
            preposition = "to" if self._direction == "sending" else "from"
            raise TransferError(f"{self._direction} {what} {preposition} rank {peer} failed: {error}") from error

    def pack(self, message: _WireMessage, peer: int, number: int) -> Tensor:
        data = self.buffer(message, peer, number)
        for segment, values in _split(message, data):
            view = segment.view(self._look_up(segment, peer), self._wire)
            if not _is_same(view, values):
                values.view(view.shape).copy_(view)
            self._unsent[peer][_param(segment)] -= 1
            if not self._unsent[peer][_param(segment)]:
                del self._held[peer, _param(segment)]
        return data

    def _look_up(self, segment: _MessageSegment, peer: int) -> Tensor:
        """Keeps a parameter from its first to its last segment to a peer: each access merges its adapters."""
        name = _param(segment)
        if self._direction == "receiving":
            return self._params[name].detach()
        if (peer, name) not in self._held:
            of_others = (self._held[other, name] for other in self._queues if (other, name) in self._held)
            param = next(of_others, None)
            self._held[peer, name] = self._params[name].detach() if param is None else param
        return self._held[peer, name]

    def buffer(self, message: _WireMessage, peer: int, number: int) -> Tensor:
        if len(message) == 1:
            view = message[0].view(self._look_up(message[0], peer), self._wire)
            if view.is_contiguous() and view.dtype == self._wire and view.device == self._devices[peer]:
                return view.view(-1)
        slot = (peer, number % WINDOW)
        if slot not in self._buffers:
            self._buffers[slot] = torch.empty(self._largest[peer], dtype=self._wire, device=self._devices[peer])
        return self._buffers[slot][: numel_of(message)]

    def add_digests(self, peer: int, number: int, data: Tensor) -> None:
        tensors = {name: tuple(segments) for name, segments in groupby(self._queues[peer][number], key=_name)}
        parts = data.split([numel_of(segments) for segments in tensors.values()])
        for (name, segments), values in zip(tensors.items(), parts, strict=True):
            key = tuple((segment.end.param, segment.end.region, segment.boxes, segment.rows) for segment in segments)
            if key not in self._computed:  # the same may go to several peers
                self._computed[key] = digest(values)
            self.digests[peer].add(name, self._computed[key])

    def compare_digests(self) -> dict[int, Tensor]:
        sent = {
            peer: torch.zeros(len(digests), dtype=torch.int64, device=self._devices[peer])
            for peer, digests in self.digests.items()
        }
        self.start(sent)
        wrong = []
        for peer, digests in self.digests.items():
            self.wait(peer)
            sent[peer] = sent[peer].cpu()
            different = digests.different(sent[peer]).items()
            wrong += [f"{name!r} (sent {a:016x}, arrived {b:016x}) from rank {peer}" for name, (a, b) in different]
        if wrong:
            named = "; ".join(wrong[:_MAX_NAMED]) + (f"; and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else "")
            raise RuntimeError(
                f"{len(wrong)} tensors {NOT_AS_SENT}: {named}. "
                "The bytes changed between the two ranks; check memory and network of their machines"
            )
        return sent


def _split(message: _WireMessage, data: Tensor) -> Iterator[tuple[_MessageSegment, Tensor]]:
    return zip(message, data.split([segment.numel for segment in message]), strict=True)


def _is_same(view: Tensor, values: Tensor) -> bool:
    return (view.device, view.data_ptr()) == (values.device, values.data_ptr())


def _unpack(message: _WireMessage, data: Tensor, params: Mapping[str, Tensor], missing: Counter[str]) -> Iterator[str]:
    for segment, values in _split(message, data):
        view = segment.view(params[segment.end.param].detach(), values.dtype)
        if not _is_same(view, values):
            view.copy_(values.view(view.shape))
        missing[segment.end.name] -= segment.numel
        if not missing[segment.end.name]:
            yield segment.end.name
