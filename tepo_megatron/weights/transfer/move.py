"""Sends every part of a tensor straight to the ranks that need it, by a plan.

Message n of every peer is in round n, digests in the last; a rank starts up to WINDOW rounds ahead. No deadlock: in the lowest
unfinished round every rank has started its messages, or will without waiting.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tepo_megatron.weights.architecture import is_always_fp32
from tepo_megatron.weights.geometry import Box, Region, ReshardPlan
from tepo_megatron.weights.transfer.digests import TensorDigests, digest
from tepo_megatron.weights.transfer.transport import Transport

MAX_NAMED = 8

Direction = Literal["sending", "receiving"]


STAGING_BYTES = 64 * 2**20  # of a rank, for messages under way to all peers

SINGLE_SEGMENT_BYTES = 256 * 2**10
"""From this size segments travel alone, without a copy if contiguous."""

_FP32_BYTES = 4

WINDOW = 2
"""One message travels while the next is packed or unpacked."""


@dataclass(frozen=True)
class MoveEnd:
    """``name`` is the destination's parameter.

    ``fp32``: both ends are fp32; each element travels as ``units`` of the wire's elements, which ``region`` counts.
    """

    peer: int
    name: str
    param: str
    region: Region
    fp32: bool = False
    units: int = 1

    def on_wire(self, itemsize: int) -> MoveEnd:
        if not self.fp32 or itemsize >= _FP32_BYTES:
            return self
        units, box = _FP32_BYTES // itemsize, self.region.box
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


WireMessage = tuple[_MessageSegment, ...]
Queues = dict[int, list[WireMessage]]


def numel_of(message: WireMessage) -> int:
    return sum(segment.numel for segment in message)


def message_sizes(queue: Iterable[WireMessage], itemsize: int) -> tuple[int, ...]:
    """The last size is the digests'."""
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
    pairs = {(move.source, move.destination) for move in plan.moves}
    peers = Counter(("source", source) for source, _ in pairs) + Counter(("destination", to) for _, to in pairs)
    return max(SINGLE_SEGMENT_BYTES, STAGING_BYTES // (WINDOW * max(peers.values(), default=1)))


def queues(ends: Iterable[MoveEnd], *, itemsize: int, limit: int) -> Queues:
    """Each message has at most ``limit`` bytes, or one row; ``itemsize`` is the wire's."""
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


def _segments(end: MoveEnd, limit: int) -> Iterator[_MessageSegment]:
    rows = end.region.box.shape[0]
    row = math.prod(end.region.box.shape[1:])
    boxes_at_once = min(end.region.count, max(1, limit // (rows * row)))
    rows_at_once = rows if rows * row <= limit else max(1, limit // row)
    for box in range(0, end.region.count, boxes_at_once):
        for first in range(0, rows, rows_at_once):
            boxes = (box, min(box + boxes_at_once, end.region.count))
            yield _MessageSegment(end, boxes, (first, min(first + rows_at_once, rows)))


def wire_dtype(source: torch.dtype, destination: torch.dtype) -> torch.dtype:
    """Returns the smaller dtype; the other side converts."""
    return source if source.itemsize < destination.itemsize else destination


def send(transport: Transport, outgoing: Queues, params: Mapping[str, Tensor], wire: torch.dtype) -> None:
    """Returns when the peers have all messages. Raises RuntimeError naming tensors and peer."""
    digests = {peer: _tensor_digests(queue) for peer, queue in outgoing.items()}
    computed: dict[tuple[object, ...], Tensor] = {}
    staging = _Staging(transport, outgoing, wire)
    for number in range(_num_rounds(outgoing) + WINDOW):
        # Message number - WINDOW used the same buffer.
        for peer, queue in _queues_with(outgoing, number - WINDOW):
            with _naming_tensors("sending", peer, queue, number - WINDOW):
                transport.wait(peer, number - WINDOW)
        packed = {peer: _pack(queue[number], params, staging, peer, number) for peer, queue in _queues_with(outgoing, number)}
        _start_round("sending", transport, outgoing, packed, number)
        for peer, data in packed.items():  # digests are computed while the messages travel
            _add_digests(digests[peer], outgoing[peer][number], data, computed)
    sent = {peer: by_tensor.as_tensor().to(transport.device(peer)) for peer, by_tensor in digests.items()}
    _start_round("sending", transport, outgoing, sent)
    for peer, queue in outgoing.items():
        with _naming_tensors("sending", peer, queue, len(queue)):
            transport.wait(peer, len(queue))


def receive(
    transport: Transport,
    incoming: Queues,
    params: Mapping[str, Tensor],
    wire: torch.dtype,
    complete: Callable[[str], None] = lambda _: None,
) -> None:
    """Calls ``complete(name)`` for each complete parameter.

    Raises RuntimeError with tensors and peer of a failed message, or tensors with another digest.
    """
    digests = {peer: _tensor_digests(queue) for peer, queue in incoming.items()}
    missing: Counter[str] = Counter()
    for queue in incoming.values():
        for segment in (segment for message in queue for segment in message):
            missing[segment.end.name] += segment.numel
    staging = _Staging(transport, incoming, wire)
    arriving: dict[int, dict[int, Tensor]] = {}
    for number in range(-WINDOW, _num_rounds(incoming)):  # below 0 there is nothing to wait for, only messages to start
        for peer, queue in _queues_with(incoming, number):
            with _naming_tensors("receiving", peer, queue, number):
                transport.wait(peer, number)
            data = arriving[number].pop(peer)
            _add_digests(digests[peer], queue[number], data)
            for name in _unpack(queue[number], data, params, missing):
                complete(name)
        ahead = number + WINDOW
        arriving[ahead] = {
            peer: _receive_buffer(queue[ahead], params, staging, peer, ahead) for peer, queue in _queues_with(incoming, ahead)
        }
        _start_round("receiving", transport, incoming, arriving[ahead], ahead)
    _compare_digests(transport, incoming, digests)


def _compare_digests(transport: Transport, incoming: Queues, digests: Mapping[int, TensorDigests]) -> None:
    sent = {
        peer: torch.zeros(len(by_tensor), dtype=torch.int64, device=transport.device(peer))
        for peer, by_tensor in digests.items()
    }
    _start_round("receiving", transport, incoming, sent)
    wrong = []
    for peer, queue in incoming.items():
        with _naming_tensors("receiving", peer, queue, len(queue)):
            transport.wait(peer, len(queue))
        wrong += [f"{what} from rank {peer}" for what in digests[peer].differences(sent[peer].cpu())]
    if wrong:
        named = "; ".join(wrong[:MAX_NAMED]) + (f"; and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else "")
        raise RuntimeError(
            f"{len(wrong)} tensors did not arrive as they were sent: {named}. "
            "The bytes changed between the two ranks; check memory and network of their machines"
        )


def _num_rounds(exchanged: Queues) -> int:
    return max((len(queue) for queue in exchanged.values()), default=0)


def _queues_with(exchanged: Queues, number: int) -> Iterator[tuple[int, list[WireMessage]]]:
    return ((peer, queue) for peer, queue in exchanged.items() if 0 <= number < len(queue))


def _start_round(
    direction: Direction, transport: Transport, exchanged: Queues, data: Mapping[int, Tensor], number: int | None = None
) -> None:
    if not data:
        return
    with transport.round():
        for peer, tensor in data.items():
            queue = exchanged[peer]
            message = len(queue) if number is None else number
            with _naming_tensors(direction, peer, queue, message):
                (transport.send if direction == "sending" else transport.receive)(tensor, peer, message)


def _tensor_digests(queue: Sequence[WireMessage]) -> TensorDigests:
    return TensorDigests(segment.end.name for message in queue for segment in message)


def _add_digests(
    digests: TensorDigests, message: WireMessage, data: Tensor, computed: dict[tuple[object, ...], Tensor] | None = None
) -> None:
    """``computed`` caches digests of segments that go to several peers."""
    for segment, values in _split(message, data):
        key = (segment.end.param, segment.end.region, segment.boxes, segment.rows)
        value = digest(values) if computed is None or key not in computed else computed[key]
        if computed is not None:
            computed[key] = value
        digests.add(segment.end.name, value)


def _split(message: WireMessage, data: Tensor) -> Iterator[tuple[_MessageSegment, Tensor]]:
    return zip(message, data.split([segment.numel for segment in message]), strict=True)


class _Staging:
    def __init__(self, transport: Transport, exchanged: Queues, wire: torch.dtype) -> None:
        self.wire = wire
        self.devices = {peer: transport.device(peer) for peer in exchanged}
        self._largest = {peer: max(map(numel_of, queue)) for peer, queue in exchanged.items()}
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def buffer(self, peer: int, number: int, numel: int) -> Tensor:
        slot = (peer, number % WINDOW)
        if slot not in self._buffers:
            self._buffers[slot] = torch.empty(self._largest[peer], dtype=self.wire, device=self.devices[peer])
        return self._buffers[slot][:numel]


def _pack(message: WireMessage, params: Mapping[str, Tensor], staging: _Staging, peer: int, number: int) -> Tensor:
    if (data := _param_view(message, params, staging.wire, staging.devices[peer])) is not None:
        return data
    data = staging.buffer(peer, number, numel_of(message))
    for segment, values in _split(message, data):
        view = segment.view(params[segment.end.param].detach(), staging.wire)
        values.view(view.shape).copy_(view)
    return data


def _receive_buffer(message: WireMessage, params: Mapping[str, Tensor], staging: _Staging, peer: int, number: int) -> Tensor:
    data = _param_view(message, params, staging.wire, staging.devices[peer])
    return staging.buffer(peer, number, numel_of(message)) if data is None else data


def _unpack(message: WireMessage, data: Tensor, params: Mapping[str, Tensor], missing: Counter[str]) -> Iterator[str]:
    for segment, values in _split(message, data):
        view = segment.view(params[segment.end.param].detach(), values.dtype)
        if (view.device, view.data_ptr()) != (values.device, values.data_ptr()):
            view.copy_(values.view(view.shape))
        missing[segment.end.name] -= segment.numel
        if not missing[segment.end.name]:
            yield segment.end.name


def _param_view(message: WireMessage, params: Mapping[str, Tensor], wire: torch.dtype, device: torch.device) -> Tensor | None:
    if len(message) > 1:
        return None
    view = message[0].view(params[message[0].end.param].detach(), wire)
    fits = view.is_contiguous() and view.dtype == wire and view.device == device
    return view.view(-1) if fits else None


@contextmanager
def _naming_tensors(direction: Direction, peer: int, queue: Sequence[WireMessage], number: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        names = [] if number == len(queue) else dict.fromkeys(segment.end.name for segment in queue[number])
        what = ", ".join(map(repr, names)) or "the digests"
        preposition = "to" if direction == "sending" else "from"
        raise RuntimeError(f"{direction} {what} {preposition} rank {peer} failed: {error}") from error
