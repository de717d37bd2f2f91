"""Messages for a worker on another GPU, relayed by the trainer rank on that GPU (docs/decisions/026-one-cluster.md).

All trainer ranks exchange message n of every queue in turn n, digests in the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.weights.geometry import ReshardPlan
from tepo_megatron.weights.transfer.messages import WINDOW, Queues, message_sizes, queues, source_ends
from tepo_megatron.weights.transfer.transport import RelayRoutes, TransferGroup


def source_routes(plan: ReshardPlan, rank: int, *, itemsize: int, limit: int) -> RelayRoutes:
    local_source = {plan.num_sources + to: source for to, source in plan.local.items()}
    outgoing: dict[int, Queues] = {
        source: queues(source_ends(plan, source), itemsize=itemsize, limit=limit) for source in range(plan.num_sources)
    }
    relayed = {
        (source, to): message_sizes(queue, itemsize)
        for source, by_peer in outgoing.items()
        for to, queue in by_peer.items()
        if to in local_source and local_source[to] != source
    }
    if not relayed:
        return RelayRoutes()
    lengths = {source: max((len(queue) for queue in by_peer.values()), default=0) for source, by_peer in outgoing.items()}
    return RelayRoutes(
        via={to: local_source[to] for source, to in relayed if source == rank},
        forwards={pair: sizes for pair, sizes in relayed.items() if local_source[pair[1]] == rank},
        sources=plan.num_sources,
        local_rounds=lengths[rank],
        rounds=max(lengths.values()),
    )


@dataclass
class SlotSignals:
    """One byte over gloo: a message is in its slot, or the worker on this GPU has copied it out."""

    start_send: Callable[[Tensor, int, int], Any]
    start_receive: Callable[[Tensor, int, int], Any]
    world_size: int

    def start_notify(self, peer: int, number: int, source: int) -> Any:
        return self.start_send(torch.zeros(1, dtype=torch.uint8), peer, number * self.world_size + source)

    def start_wait(self, peer: int, number: int, source: int) -> Any:
        return self.start_receive(torch.zeros(1, dtype=torch.uint8), peer, number * self.world_size + source)


@dataclass
class Relay:
    """``slots``: (source, worker) → uint8 [WINDOW, bytes], open in the worker. ``leg`` connects the trainer's ranks."""

    rank: int
    routes: RelayRoutes
    leg: TransferGroup
    signals: SlotSignals
    slots: Mapping[tuple[int, int], Tensor]
    synchronize: Callable[[], None]
    _turn: int = 0
    _sending: list[tuple[Tensor, int, int]] = field(default_factory=list)
    _arriving: list[tuple[int, int, int]] = field(default_factory=list)
    _taken: dict[tuple[int, int, int], list[Any]] = field(default_factory=dict)
    """(source, worker, number) → works of the notification and of the worker's answer."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Sends of its block travel when it ends."""
        turn = self._turn if self._turn < self.routes.local_rounds else self.routes.rounds
        self._catch_up(turn)
        yield
        self._exchange(turn)

    def send(self, data: Tensor, worker: int, number: int) -> None:
        """``data`` must be contiguous, and must not change until :meth:`wait`."""
        self._sending.append((data, worker, number))

    def wait(self, worker: int, number: int) -> None:
        """Returns when the rank on ``worker``'s GPU has the message."""
        self.settle()
        via = self.routes.via[worker]
        self.leg.wait(via, self._tag(number, worker, self.rank, via))

    def settle(self) -> None:
        """Must be called before this rank waits for anything else: workers wait for the notification."""
        arriving, self._arriving = self._arriving, []
        for source, worker, number in arriving:
            with _naming("receiving", source, worker):
                self.leg.wait(source, self._tag(number, worker, source, self.rank))
        if arriving:
            self.synchronize()
        for source, worker, number in arriving:
            notification = self.signals.start_notify(worker, number, source)
            self._taken[source, worker, number] = [notification, self.signals.start_wait(worker, number, source)]

    def finish(self) -> None:
        """Returns when the workers have copied all messages."""
        self._catch_up(self.routes.rounds)
        if self._turn == self.routes.rounds:
            self._exchange(self._turn)
        for key in list(self._taken):
            self._await_taken(key)
        self._turn = 0

    def _catch_up(self, turn: int) -> None:
        while self._turn < turn:
            self._exchange(self._turn)

    def _exchange(self, turn: int) -> None:
        self.settle()
        incoming = list(self._coming(turn))
        for source, worker, number in incoming:
            self._await_taken((source, worker, number - WINDOW))
        self._turn = turn + 1
        sending, self._sending = self._sending, []
        if sending or incoming:
            with self.leg.round():  # both ends of a pair start by the worker's number: NCCL matches by order
                for data, worker, number in sorted(sending, key=lambda item: item[1:]):
                    via = self.routes.via[worker]
                    self.leg.send(data.view(torch.uint8), via, self._tag(number, worker, self.rank, via))
                for source, worker, number in incoming:
                    slot = self.slots[source, worker][number % WINDOW, : self.routes.forwards[source, worker][number]]
                    self.leg.receive(slot, source, self._tag(number, worker, source, self.rank))
        self._arriving = incoming
        if turn == self.routes.rounds:
            self.settle()

    def _coming(self, turn: int) -> Iterator[tuple[int, int, int]]:
        for source, worker in sorted(self.routes.forwards, key=lambda pair: pair[::-1]):
            digests = len(self.routes.forwards[source, worker]) - 1
            if turn == self.routes.rounds or turn < digests:
                yield source, worker, min(turn, digests)

    def _await_taken(self, key: tuple[int, int, int]) -> None:
        source, worker, _ = key
        with _naming("passing on", source, worker):
            for work in self._taken.pop(key, ()):
                work.wait()

    def _tag(self, number: int, worker: int, source: int, to: int) -> int:
        return (number * self.signals.world_size + worker) * 2 + (source > to)


@contextmanager
def _naming(what: str, source: int, worker: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{what} a message from rank {source} to rank {worker} failed: {error}") from error
