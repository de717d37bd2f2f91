"""A trainer rank's end of a weight update. Rank 0 speaks with the servers; the other ranks do what it tells them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tepo_megatron.bridge.geometry import Box, Region, ReshardPlan
from tepo_megatron.bridge.transfer.messages import (
    End,
    Queues,
    destination_ends,
    largest_bytes,
    message_bytes,
    queues,
    source_ends,
    wire_dtype,
)
from tepo_megatron.bridge.transfer.move import send
from tepo_megatron.bridge.transfer.transport import Group, TransportName, announce_departure, connect, listen, own_address
from tepo_megatron.bridge.transfer.transports import Member, join

_FAILED = "failed"
"""Where, at the meeting place, the first of the other ranks to fail says why."""


class ShardSender:
    """Sends this rank's shards of ``params`` (Megatron's names) by ``plan``; every trainer rank has one.

    ``dtype`` is that of the servers' weights. ``told(value)`` gives rank 0's value to every rank, all of which call. In each
    update rank 0 calls ``open`` (the first time, and after a failure), ``announce``, ``join``, ``send`` and ``conclude``, in
    this order, and the others ``follow``. ``device`` is the one that ``params`` are on, ``transport`` how they travel.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        params: Mapping[str, Tensor],
        *,
        rank: int,
        dtype: torch.dtype,
        told: Callable[[Any], Any],
        timeout_s: float,
        device: torch.device | None = None,
        transport: TransportName = "gloo",
    ) -> None:
        self.num_sources, self.world_size = plan.num_sources, plan.num_sources + plan.num_destinations
        self._plan, self._params, self._rank, self._told, self._timeout_s = plan, params, rank, told, timeout_s
        self._wire = wire_dtype(next(iter(params.values())).dtype, dtype)
        self._limit = message_bytes(plan)
        self._outgoing = queues(source_ends(plan, rank), itemsize=self._wire.itemsize, limit=self._limit)
        self._device, self._transport = device or torch.device("cpu"), transport
        self._meeting: list[Any] | None = None
        self._store: TCPStore | None = None
        self._group: Group | None = None
        self._announced = False
        self._failed = ""

    def open(self, host: str) -> int:
        """Rank 0: opens a meeting place on a free port of ``host``, where every worker finds its orders; returns the port."""
        self.close()
        self._store, port = listen(host)
        for destination in range(self._plan.num_destinations):
            order = encode_order(
                destination_ends(self._plan, destination),
                self._wire,
                self._limit,
                transport=self._transport,
                near=self._plan.local.get(destination),
            )
            self._store.set(order_key(self.num_sources + destination), order)
        self._meeting = [host, port]
        return port

    def announce(self) -> None:
        """Rank 0: has the other ranks join the group at the meeting place, unless they are in it, and send."""
        self._told(self._meeting)
        self._announced = True

    def join(self) -> None:
        """Enters the group, unless it is in it; returns when all ranks and workers have. RuntimeError after the time-out."""
        if self._group is None:
            assert self._meeting is not None
            host, port = self._meeting
            store = self._store = self._store or connect(host, port, self._timeout_s)
            address = own_address(host, port)
            member = Member(self._rank, self.world_size, self._device, address, same_gpu_receivers=self._gives())
            self._group = join(self._transport, store, member, self._timeout_s)

    def _gives(self) -> dict[int, int]:
        near = [self.num_sources + to for to, source in self._plan.local.items() if source == self._rank]
        return {peer: largest_bytes(self._outgoing[peer], self._wire.itemsize) for peer in near if peer in self._outgoing}

    def send(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Sends this rank's part of every tensor, with digests. Raises RuntimeError naming tensors and peer.

        ``cancelled`` is asked where a dead receiver could not be noticed otherwise.
        """
        assert self._group is not None
        self._group.cancelled = cancelled
        with torch.no_grad():
            send(self._group, self._outgoing, self._params, self._wire)

    def conclude(self, arrived: bool) -> str:
        """Rank 0: tells the other ranks whether all servers have the weights; without that they wait.

        If not, leaves the group, and returns which of the other ranks failed first, and why; empty if none had.
        """
        if not arrived:
            self.close()
        self._told(arrived if self._announced else None)
        self._announced = False
        failed, self._failed = self._failed, ""
        return failed

    def follow(self) -> None:
        """Every rank but 0: its part of an update. A failure is rank 0's to report, since it knows what the servers say: what
        was the first is left at the meeting place for it.

        Raises RuntimeError only if this rank failed and rank 0 believes that all went well.
        """
        meeting = self._told(None)
        if meeting is None:
            return
        failure: RuntimeError | None = None
        try:
            if meeting != self._meeting:
                self.close()
                self._meeting = meeting
            self.join()
            self.send()
        except RuntimeError as error:
            failure = error
            self._report(error)
            self.close()  # the others' pending messages fail, and they need not wait for the time-out
        arrived = self._told(None)
        if not arrived:
            self.close()
        elif failure is not None:
            raise RuntimeError(f"trainer rank {self._rank} did not send its weights: {failure}") from failure

    def _report(self, error: RuntimeError) -> None:
        if self._store is not None:
            with suppress(RuntimeError):  # the store has gone with rank 0, which then has an error of its own
                self._store.compare_set(_FAILED, "", f"The first other trainer rank to fail was rank {self._rank}: {error}")

    def close(self) -> None:
        """Leaves the group; pending messages of the others fail, and those who are still coming need not wait for it."""
        if self._rank == 0 and self._store is not None and self._store.check([_FAILED]):
            self._failed = self._store.get(_FAILED).decode()  # here, since the store goes
        if self._group is not None:
            self._group.close()
        elif self._store is not None:
            announce_departure(self._store)
        self._group = self._meeting = self._store = None


def order_key(rank: int) -> str:
    """Where, at the meeting place, the worker that is ``rank`` in the group finds what it will receive."""
    return f"order/{rank}"


class Order(NamedTuple):
    """What a worker receives: messages by sender, their dtype, how they come, and the sender on its own GPU if there is one."""

    incoming: Queues
    wire: torch.dtype
    transport: TransportName
    near: int | None

    @property
    def takes(self) -> tuple[int, ...]:
        """Senders on the same GPU."""
        return () if self.near not in self.incoming else (self.near,)


def encode_order(
    ends: list[End], wire: torch.dtype, limit: int, *, transport: TransportName = "gloo", near: int | None = None
) -> str:
    """What a worker must know to receive: dtype on the wire, size of a message in bytes, and its ends of the moves."""
    moves = [
        [end.peer, end.param, end.region.box.start, end.region.box.stop, end.region.count, end.region.step] for end in ends
    ]
    dtype = str(wire).removeprefix("torch.")
    return json.dumps({"dtype": dtype, "limit": limit, "transport": transport, "near": near, "moves": moves})


def decode_order(text: str | bytes) -> Order:
    """What :func:`encode_order` wrote."""
    raw = json.loads(text)
    wire: torch.dtype = getattr(torch, raw["dtype"])
    ends = [
        End(peer, param, param, Region(Box(tuple(start), tuple(stop)), count, step))
        for peer, param, start, stop, count, step in raw["moves"]
    ]
    return Order(queues(ends, itemsize=wire.itemsize, limit=raw["limit"]), wire, raw["transport"], raw["near"])
