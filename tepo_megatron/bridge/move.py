"""Carries out a plan between processes: every source rank sends its part of a tensor straight to the ranks that need it.

Each pair of ranks has its own queue of messages, which both derive from the same moves, so only weights cross the wire. All
ranks go through their queues in rounds (message 0 of every peer, message 1, …), two messages ahead. The unfinished message of
the lowest round has both its ranks at it: nobody waits in a circle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

import torch
from torch import Tensor

from tepo_megatron.bridge.messages import WINDOW, Message, Piece, Queues
from tepo_megatron.bridge.verify import Tally, digest

NAMED = 8
"""How many damaged tensors an error names."""


class Transport(Protocol):
    """Point-to-point messages. A message is known by the other rank and its number; both ends must give the same size."""

    def send(self, data: Tensor, peer: int, number: int) -> None:
        """Starts to send a contiguous tensor, which must not change until :meth:`finish`."""

    def receive(self, data: Tensor, peer: int, number: int) -> None:
        """Starts to fill a contiguous tensor."""

    def finish(self, peer: int, number: int) -> None:
        """Waits for a message. Raises RuntimeError if it fails or takes longer than the transport's time-out."""


def send(transport: Transport, outgoing: Queues, params: Mapping[str, Tensor], wire: torch.dtype) -> None:
    """Sends all messages of this rank and, last, each peer's digests; returns when the peers have them.

    Raises RuntimeError naming the tensors and the peer when a message fails or times out.
    """
    tallies = {peer: _tally(queue) for peer, queue in outgoing.items()}
    known: dict[tuple[object, ...], int] = {}
    staging = _Staging(outgoing, wire)
    for number in range(_rounds(outgoing) + WINDOW):
        for peer, queue in outgoing.items():
            if 0 <= number - WINDOW < len(queue):
                with _naming("sending", peer, queue, number - WINDOW):
                    transport.finish(peer, number - WINDOW)
            if number < len(queue):
                message = queue[number]
                data = _pack(message, params, staging, peer, number)
                with _naming("sending", peer, queue, number):
                    transport.send(data, peer, number)
                _count(tallies[peer], message, data, known)
    digests = {peer: tally.as_tensor() for peer, tally in tallies.items()}
    for peer, queue in outgoing.items():
        with _naming("sending", peer, queue, len(queue)):
            transport.send(digests[peer], peer, len(queue))
    for peer, queue in outgoing.items():
        with _naming("sending", peer, queue, len(queue)):
            transport.finish(peer, len(queue))


def receive(
    transport: Transport,
    incoming: Queues,
    params: Mapping[str, Tensor],
    wire: torch.dtype,
    complete: Callable[[str], None] = lambda _: None,
) -> None:
    """Receives all messages of this rank into its parameters, and compares digests with every sender's.

    ``complete(name)`` is called when all elements of a parameter have been written. Raises RuntimeError naming the tensors and
    the peer when a message fails or times out, and naming every tensor whose digests differ, with both.
    """
    tallies = {peer: _tally(queue) for peer, queue in incoming.items()}
    missing: Counter[str] = Counter()
    for queue in incoming.values():
        for piece in (piece for message in queue for piece in message):
            missing[piece.end.name] += piece.numel
    staging = _Staging(incoming, wire)
    arriving: dict[tuple[int, int], Tensor] = {}
    for number in range(-WINDOW, _rounds(incoming)):
        for peer, queue in incoming.items():
            if 0 <= number < len(queue):
                with _naming("receiving", peer, queue, number):
                    transport.finish(peer, number)
                data = arriving.pop((peer, number))
                _count(tallies[peer], queue[number], data)
                for name in _unpack(queue[number], data, params, missing):
                    complete(name)
            if (ahead := number + WINDOW) < len(queue):
                data = arriving[peer, ahead] = _landing(queue[ahead], params, staging, peer, ahead)
                with _naming("receiving", peer, queue, ahead):
                    transport.receive(data, peer, ahead)
    _compare(transport, incoming, tallies)


def _compare(transport: Transport, incoming: Queues, tallies: Mapping[int, Tally]) -> None:
    sent = {peer: torch.zeros_like(tally.as_tensor()) for peer, tally in tallies.items()}
    for peer, queue in incoming.items():
        with _naming("receiving", peer, queue, len(queue)):
            transport.receive(sent[peer], peer, len(queue))
    wrong = []
    for peer, queue in incoming.items():
        with _naming("receiving", peer, queue, len(queue)):
            transport.finish(peer, len(queue))
        wrong += [f"{what} from rank {peer}" for what in tallies[peer].differences(sent[peer])]
    if wrong:
        named = "; ".join(wrong[:NAMED]) + (f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else "")
        raise RuntimeError(
            f"{len(wrong)} tensors did not arrive as they were sent: {named}. "
            "The bytes changed between the two ranks; check memory and network of their machines"
        )


def _rounds(exchanged: Queues) -> int:
    return max((len(queue) for queue in exchanged.values()), default=0)


def _tally(queue: Sequence[Message]) -> Tally:
    return Tally(piece.end.name for message in queue for piece in message)


def _count(tally: Tally, message: Message, data: Tensor, known: dict[tuple[object, ...], int] | None = None) -> None:
    """Adds the message's digests; ``known`` remembers those of pieces that go to several peers."""
    for piece, part in _parts(message, data):
        key = (piece.end.param, piece.end.region, piece.counts, piece.rows)
        found = digest(part) if known is None or key not in known else known[key]
        if known is not None:
            known[key] = found
        tally.add(piece.end.name, found)


def _parts(message: Message, data: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    return zip(message, data.split([piece.numel for piece in message]), strict=True)


class _Staging:
    """Buffers for messages that cannot travel from or into a parameter directly, made when first used."""

    def __init__(self, exchanged: Queues, wire: torch.dtype) -> None:
        self.wire = wire
        self._largest = {peer: max(map(_numel, queue)) for peer, queue in exchanged.items()}
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def buffer(self, peer: int, number: int, numel: int) -> Tensor:
        slot = (peer, number % WINDOW)
        if slot not in self._buffers:
            self._buffers[slot] = torch.empty(self._largest[peer], dtype=self.wire)
        return self._buffers[slot][:numel]


def _pack(message: Message, params: Mapping[str, Tensor], staging: _Staging, peer: int, number: int) -> Tensor:
    if (data := _direct(message, params, staging.wire)) is not None:
        return data
    data = staging.buffer(peer, number, _numel(message))
    for piece, part in _parts(message, data):
        view = piece.view(params[piece.end.param].detach())
        part.view(view.shape).copy_(view)
    return data


def _landing(message: Message, params: Mapping[str, Tensor], staging: _Staging, peer: int, number: int) -> Tensor:
    data = _direct(message, params, staging.wire)
    return staging.buffer(peer, number, _numel(message)) if data is None else data


def _unpack(message: Message, data: Tensor, params: Mapping[str, Tensor], missing: Counter[str]) -> Iterator[str]:
    """Writes what was not received in place; yields the parameters that are complete."""
    for piece, part in _parts(message, data):
        view = piece.view(params[piece.end.param].detach())
        if view.data_ptr() != part.data_ptr():
            view.copy_(part.view(view.shape))
        missing[piece.end.name] -= piece.numel
        if not missing[piece.end.name]:
            yield piece.end.name


def _direct(message: Message, params: Mapping[str, Tensor], wire: torch.dtype) -> Tensor | None:
    """The message's bytes within the parameter itself, if it is one contiguous piece on the CPU in the wire's dtype."""
    if len(message) > 1:
        return None
    view = message[0].view(params[message[0].end.param].detach())
    fits = view.is_contiguous() and view.dtype == wire and view.device.type == "cpu"
    return view.view(-1) if fits else None


def _numel(message: Message) -> int:
    return sum(piece.numel for piece in message)


@contextmanager
def _naming(doing: Literal["sending", "receiving"], peer: int, queue: Sequence[Message], number: int) -> Iterator[None]:
    """Says in an error of the transport which tensors it was about."""
    try:
        yield
    except RuntimeError as error:
        names = [] if number == len(queue) else dict.fromkeys(piece.end.name for piece in queue[number])
        what = ", ".join(map(repr, names)) or "the digests"
        way = "to" if doing == "sending" else "from"
        raise RuntimeError(f"{doing} {what} {way} rank {peer} failed: {error}") from error
