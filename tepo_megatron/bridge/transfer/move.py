"""Carries out a plan between processes: every source rank sends its part of a tensor straight to the ranks that need it.

Each pair of ranks has its own queue of messages, which both derive from the same moves, so only weights cross the wire. All
ranks go through their queues in rounds (message 0 of every peer, message 1, …), two messages ahead. The unfinished message of
the lowest round has both its ranks at it: nobody waits in a circle. Last comes a round of digests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from tepo_megatron.bridge.transfer.messages import WINDOW, Message, Piece, Queues, numel_of
from tepo_megatron.bridge.transfer.transport import Transport
from tepo_megatron.bridge.transfer.verification import Tally, digest

NAMED = 8
"""How many damaged tensors an error names."""

Doing = Literal["sending", "receiving"]


def send(transport: Transport, outgoing: Queues, params: Mapping[str, Tensor], wire: torch.dtype) -> None:
    """Sends all messages of this rank and, last, each peer's digests; returns when the peers have them.

    Raises RuntimeError naming the tensors and the peer when a message fails or times out.
    """
    tallies = {peer: _tally(queue) for peer, queue in outgoing.items()}
    known: dict[tuple[object, ...], Tensor] = {}
    staging = _Staging(transport, outgoing, wire)
    for number in range(_rounds(outgoing) + WINDOW):
        for peer, queue in _at(outgoing, number - WINDOW):
            with _naming("sending", peer, queue, number - WINDOW):
                transport.finish(peer, number - WINDOW)
        packed = {peer: _pack(queue[number], params, staging, peer, number) for peer, queue in _at(outgoing, number)}
        _start("sending", transport, outgoing, packed, number)
        for peer, data in packed.items():
            _count(tallies[peer], outgoing[peer][number], data, known)
    digests = {peer: tally.as_tensor().to(transport.device(peer)) for peer, tally in tallies.items()}
    _start("sending", transport, outgoing, digests)
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
    staging = _Staging(transport, incoming, wire)
    arriving: dict[int, dict[int, Tensor]] = {}
    for number in range(-WINDOW, _rounds(incoming)):
        for peer, queue in _at(incoming, number):
            with _naming("receiving", peer, queue, number):
                transport.finish(peer, number)
            data = arriving[number].pop(peer)
            _count(tallies[peer], queue[number], data)
            for name in _unpack(queue[number], data, params, missing):
                complete(name)
        ahead = number + WINDOW
        arriving[ahead] = {peer: _landing(queue[ahead], params, staging, peer, ahead) for peer, queue in _at(incoming, ahead)}
        _start("receiving", transport, incoming, arriving[ahead], ahead)
    _compare(transport, incoming, tallies)


def _compare(transport: Transport, incoming: Queues, tallies: Mapping[int, Tally]) -> None:
    sent = {peer: torch.zeros(len(tally), dtype=torch.int64, device=transport.device(peer)) for peer, tally in tallies.items()}
    _start("receiving", transport, incoming, sent)
    wrong = []
    for peer, queue in incoming.items():
        with _naming("receiving", peer, queue, len(queue)):
            transport.finish(peer, len(queue))
        wrong += [f"{what} from rank {peer}" for what in tallies[peer].differences(sent[peer].cpu())]
    if wrong:
        named = "; ".join(wrong[:NAMED]) + (f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else "")
        raise RuntimeError(
            f"{len(wrong)} tensors did not arrive as they were sent: {named}. "
            "The bytes changed between the two ranks; check memory and network of their machines"
        )


def _rounds(exchanged: Queues) -> int:
    return max((len(queue) for queue in exchanged.values()), default=0)


def _at(exchanged: Queues, number: int) -> Iterator[tuple[int, list[Message]]]:
    """The peers with which there is a message ``number``, and their queues."""
    return ((peer, queue) for peer, queue in exchanged.items() if 0 <= number < len(queue))


def _start(
    doing: Doing, transport: Transport, exchanged: Queues, data: Mapping[int, Tensor], number: int | None = None
) -> None:
    """Starts one round, ``data`` by peer: its messages ``number``, or the digests that follow the last one."""
    if not data:
        return
    with transport.together():
        for peer, tensor in data.items():
            queue = exchanged[peer]
            at = len(queue) if number is None else number
            with _naming(doing, peer, queue, at):
                (transport.send if doing == "sending" else transport.receive)(tensor, peer, at)


def _tally(queue: Sequence[Message]) -> Tally:
    return Tally(piece.end.name for message in queue for piece in message)


def _count(tally: Tally, message: Message, data: Tensor, known: dict[tuple[object, ...], Tensor] | None = None) -> None:
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
    """Buffers for messages that cannot travel from or into a parameter directly, made when first used, where they must lie."""

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


def _pack(message: Message, params: Mapping[str, Tensor], staging: _Staging, peer: int, number: int) -> Tensor:
    if (data := _direct(message, params, staging.wire, staging.devices[peer])) is not None:
        return data
    data = staging.buffer(peer, number, numel_of(message))
    for piece, part in _parts(message, data):
        view = piece.view(params[piece.end.param].detach())
        part.view(view.shape).copy_(view)
    return data


def _landing(message: Message, params: Mapping[str, Tensor], staging: _Staging, peer: int, number: int) -> Tensor:
    data = _direct(message, params, staging.wire, staging.devices[peer])
    return staging.buffer(peer, number, numel_of(message)) if data is None else data


def _unpack(message: Message, data: Tensor, params: Mapping[str, Tensor], missing: Counter[str]) -> Iterator[str]:
    """Writes what was not received in place; yields the parameters that are complete."""
    for piece, part in _parts(message, data):
        view = piece.view(params[piece.end.param].detach())
        if (view.device, view.data_ptr()) != (part.device, part.data_ptr()):
            view.copy_(part.view(view.shape))
        missing[piece.end.name] -= piece.numel
        if not missing[piece.end.name]:
            yield piece.end.name


def _direct(message: Message, params: Mapping[str, Tensor], wire: torch.dtype, device: torch.device) -> Tensor | None:
    """The message's bytes within the parameter itself, if it is one contiguous piece in the wire's dtype, and lies there."""
    if len(message) > 1:
        return None
    view = message[0].view(params[message[0].end.param].detach())
    fits = view.is_contiguous() and view.dtype == wire and view.device == device
    return view.view(-1) if fits else None


@contextmanager
def _naming(doing: Doing, peer: int, queue: Sequence[Message], number: int) -> Iterator[None]:
    """Says in an error of the transport which tensors it was about."""
    try:
        yield
    except RuntimeError as error:
        names = [] if number == len(queue) else dict.fromkeys(piece.end.name for piece in queue[number])
        what = ", ".join(map(repr, names)) or "the digests"
        way = "to" if doing == "sending" else "from"
        raise RuntimeError(f"{doing} {what} {way} rank {peer} failed: {error}") from error
