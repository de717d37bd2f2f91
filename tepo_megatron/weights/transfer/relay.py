"""Messages for a worker on another GPU: to the trainer rank on that GPU first, which passes them on within it.

The trainer's ranks are connected GPU to GPU, a rank and the worker on its GPU by shared memory; nothing connects a rank with
the other workers but the memory of the hosts. So message n of the queue from rank s to worker d goes from s to ``local[d]``,
into the very slot out of which d copies it. The digests are those of s: what happens on the way is noticed.

All trainer ranks exchange in turns: in turn n everything that is message n of its queue, in the last turn the digests. A rank
starts a turn when it has started all before. So they cannot wait for each other in a circle: in the lowest turn that is
unfinished anywhere each rank has started its part, or will without waiting for anything in a later one.
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
from tepo_megatron.weights.transfer.transport import Group, Routes


def source_routes(plan: ReshardPlan, rank: int, *, itemsize: int, limit: int) -> Routes:
    """Returns the routes of trainer rank ``rank``; empty where no message of the plan has to be passed on."""
    near = {plan.num_sources + to: source for to, source in plan.local.items()}
    outgoing: dict[int, Queues] = {
        source: queues(source_ends(plan, source), itemsize=itemsize, limit=limit) for source in range(plan.num_sources)
    }
    far = {
        (source, to): message_sizes(queue, itemsize)
        for source, by_peer in outgoing.items()
        for to, queue in by_peer.items()
        if to in near and near[to] != source
    }
    if not far:
        return Routes()
    lengths = {source: max((len(queue) for queue in by_peer.values()), default=0) for source, by_peer in outgoing.items()}
    return Routes(
        via={to: near[to] for source, to in far if source == rank},
        forwards={pair: sizes for pair, sizes in far.items() if near[pair[1]] == rank},
        sources=plan.num_sources,
        own_rounds=lengths[rank],
        rounds=max(lengths.values()),
    )


@dataclass
class Signals:
    """One byte over gloo between a rank and the worker on its GPU: a message lies in its slot, or was taken out of it."""

    start_send: Callable[[Tensor, int, int], Any]
    start_receive: Callable[[Tensor, int, int], Any]
    world_size: int

    def told(self, peer: int, number: int, source: int) -> Any:
        """Starts to tell ``peer`` of message ``number`` of rank ``source``; returns torch's work."""
        return self.start_send(torch.zeros(1, dtype=torch.uint8), peer, number * self.world_size + source)

    def heard(self, peer: int, number: int, source: int) -> Any:
        """Starts to wait until ``peer`` tells of it; returns torch's work."""
        return self.start_receive(torch.zeros(1, dtype=torch.uint8), peer, number * self.world_size + source)


@dataclass
class Relay:
    """A trainer rank's part in what is passed on. ``leg`` connects the trainer's ranks; ``slots``: (source, worker) → uint8
    [WINDOW, bytes], which the worker has open. ``synchronize`` returns when copies on the GPU have been made.
    """

    rank: int
    routes: Routes
    leg: Group
    signals: Signals
    slots: Mapping[tuple[int, int], Tensor]
    synchronize: Callable[[], None]
    _turn: int = 0
    _sending: list[tuple[Tensor, int, int]] = field(default_factory=list)
    _arriving: list[tuple[int, int, int]] = field(default_factory=list)
    """(source, worker, number) on their way to this rank."""
    _taken: dict[tuple[int, int, int], list[Any]] = field(default_factory=dict)
    """The same, of what lies in its slot: that it was told, and that the worker took it."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """What its block gives to :meth:`send` travels when it ends, with what the other ranks send in this turn."""
        turn = self._turn if self._turn < self.routes.own_rounds else self.routes.rounds
        self._catch_up(turn)
        yield
        self._exchange(turn)

    def send(self, data: Tensor, worker: int, number: int) -> None:
        """Starts to send a contiguous tensor to the rank on ``worker``'s GPU; it must not change until :meth:`wait`."""
        self._sending.append((data, worker, number))

    def wait(self, worker: int, number: int) -> None:
        """Returns when the rank on ``worker``'s GPU has the message. Raises as the transport between the ranks."""
        self.settle()
        via = self.routes.via[worker]
        self.leg.wait(via, self._tag(number, worker, self.rank, via))

    def settle(self) -> None:
        """Tells the workers of what was started and has come; to be called before this rank waits for anything else."""
        arriving, self._arriving = self._arriving, []
        for source, worker, number in arriving:
            with _naming("receiving", source, worker):
                self.leg.wait(source, self._tag(number, worker, source, self.rank))
        if arriving:
            self.synchronize()
        for source, worker, number in arriving:
            told = self.signals.told(worker, number, source)
            self._taken[source, worker, number] = [told, self.signals.heard(worker, number, source)]

    def finish(self) -> None:
        """Passes on what is left, and returns when the workers have taken it all."""
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
        coming = list(self._coming(turn))
        for source, worker, number in coming:
            self._await_taken((source, worker, number - WINDOW))
        self._turn = turn + 1
        sending, self._sending = self._sending, []
        if sending or coming:
            with self.leg.round():  # both ends of a pair start by the worker's number: NCCL matches by order
                for data, worker, number in sorted(sending, key=lambda each: each[1:]):
                    via = self.routes.via[worker]
                    self.leg.send(data.view(torch.uint8), via, self._tag(number, worker, self.rank, via))
                for source, worker, number in coming:
                    slot = self.slots[source, worker][number % WINDOW, : self.routes.forwards[source, worker][number]]
                    self.leg.receive(slot, source, self._tag(number, worker, source, self.rank))
        self._arriving = coming
        if turn == self.routes.rounds:
            self.settle()

    def _coming(self, turn: int) -> Iterator[tuple[int, int, int]]:
        """What is passed on in a turn, by worker: of every queue message ``turn``, or in the last turn its digests."""
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
        """The same at both ends, and another one for what goes the other way."""
        return (number * self.signals.world_size + worker) * 2 + (source > to)


@contextmanager
def _naming(what: str, source: int, worker: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{what} a message from rank {source} to rank {worker} failed: {error}") from error
