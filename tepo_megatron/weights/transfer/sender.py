from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from warnings import warn

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.distributed import Store, is_nccl_available  # type: ignore[attr-defined]

from tepo_megatron.weights.geometry import ReshardPlan
from tepo_megatron.weights.transfer import move
from tepo_megatron.weights.transfer.transport import (
    RelayRoutes,
    Rendezvous,
    TransferError,
    TransferGroup,
    connect,
    listen,
    local_address,
)
from tepo_megatron.weights.transfer.transports import Member, find_transport, join
from tepo_megatron.weights.transfer.transports.ipc import source_routes

_FAILED = "failed"  # 1 if at the rank's own work, 0 if at a peer or a message, then rank and cause


class ShardSender:
    """Sends this rank's shards of ``params`` (Megatron's names) by ``plan``; every trainer rank has one.

    Per update rank 0 calls ``open_rendezvous`` (first and after a failure), ``broadcast_rendezvous``, ``join_group``,
    ``send_shards``, ``finish_update``; others call ``update_as_non_root``.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        params: Mapping[str, Tensor],
        *,
        rank: int,
        dtype: torch.dtype,
        broadcast_from_root: Callable[[Any], Any],
        timeout_s: float,
        device: torch.device | None = None,
        transport: str = "gloo",
        or_gloo: bool = False,
    ) -> None:
        self.num_sources, self.world_size = plan.num_sources, plan.world_size
        self._plan, self._params, self._rank, self._timeout_s = plan, params, rank, timeout_s
        self._broadcast_from_root = broadcast_from_root
        self._wire = move.wire_dtype(next(iter(params.values())).dtype, dtype)
        self._limit, self._alone = move.message_limits(plan, find_transport(transport))
        sizes = {"itemsize": self._wire.itemsize, "limit": self._limit, "alone": self._alone}
        self._outgoing = move.queues(move.MoveEnd.of(plan, rank), **sizes)
        self._device, self._transport, self._or_gloo = device or torch.device("cpu"), transport, or_gloo
        # Without NCCL the trainer's ranks cannot send from GPU to GPU: messages to another GPU then take gloo.
        passes_on = transport == "ipc" and is_nccl_available()
        self._routes = source_routes(plan, rank, **sizes) if passes_on else RelayRoutes()
        self._rendezvous: list[Any] | None = None
        self._store: Store | None = None
        self._group: TransferGroup | None = None
        self._others_wait = False
        self.failed, self.own_fault = "", False

    def open_rendezvous(self, host: str) -> str:
        """Rank 0 calls; returns the place for ``connect``."""
        self.close()
        self._store, place = listen(host)
        for destination in range(self._plan.num_destinations):
            worker = self.num_sources + destination
            order = ReceiveOrder(
                move.MoveEnd.of(self._plan, worker),
                str(self._wire).removeprefix("torch."),
                self._limit,
                self._transport,
                alone=self._alone,
                near=self._plan.local.get(destination),
                relayed=bool(self._routes.sources),
                or_gloo=self._or_gloo,
            )
            self._store.set(ReceiveOrder.key(worker), order.encode())  # type: ignore[arg-type]  # takes bytes
        self._rendezvous = [host, place]
        return place

    def broadcast_rendezvous(self) -> None:
        self._broadcast_from_root(self._rendezvous)
        self._others_wait = True

    def join_group(self) -> None:
        if self._group is None:
            assert self._rendezvous is not None
            host, place = self._rendezvous
            store = self._store = self._store or connect(host, place, self._timeout_s)
            receivers = {
                peer: max(move.message_sizes(queue, self._wire.itemsize))
                for peer, queue in self._outgoing.items()
                if self._plan.local.get(peer - self.num_sources) == self._rank
            }
            member = Member(
                self._rank,
                self.world_size,
                self._device,
                local_address(host),
                name=f"trainer rank {self._rank}",
                same_gpu_receivers=receivers,
                routes=self._routes,
            )
            self._group = join(self._transport, store, member, self._timeout_s, or_gloo=self._or_gloo)

    def send_shards(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Raises TransferError naming tensors and peer."""
        assert self._group is not None
        self._group.cancelled = cancelled
        with torch.no_grad():
            move.send(self._group, self._outgoing, self._params, self._wire)
        self._group.finish()

    def finish_update(self, arrived: bool) -> str:
        """Rank 0 calls. Returns the first other rank that failed, and why, or ""."""
        if not arrived:
            self.close()
        self._broadcast_from_root(arrived if self._others_wait else None)
        self._others_wait = False
        failed, self.failed, self.own_fault = self.failed, "", False
        return failed

    def update_as_non_root(self) -> None:
        """Raises RuntimeError only for a failure that rank 0 does not know."""
        rendezvous = self._broadcast_from_root(None)
        if rendezvous is None:
            return
        failure: RuntimeError | None = None
        joined = False
        try:
            if rendezvous != self._rendezvous:
                self.close()
                self._rendezvous = rendezvous
            self.join_group()
            joined = True
            self.send_shards()
        except RuntimeError as error:
            failure = error
            self._report(error, is_own=joined and not isinstance(error, TransferError))
            self.close()  # the others' pending messages fail, and they need not wait for the time-out
        arrived = self._broadcast_from_root(None)
        if not arrived:
            self.close()
        elif failure is not None:
            raise RuntimeError(f"trainer rank {self._rank} did not send its weights: {failure}") from failure

    def _report(self, error: RuntimeError, *, is_own: bool) -> None:
        if self._store is None:  # rank 0 cannot be told: it waits for all members
            warn(f"trainer rank {self._rank} cannot take part in a weight update: {error}", stacklevel=2)
        else:
            with suppress(RuntimeError):  # rank 0 is gone, and the store with it; it has its own error
                reason = f"The first other trainer rank to fail was rank {self._rank}: {error}"
                self._store.compare_set(_FAILED, "", f"{is_own:d}{reason}")

    def close(self) -> None:
        """Other ranks' pending messages and joins fail."""
        store = self._store
        if self._rank == 0 and store is not None and not Rendezvous.lacks_its_file(store) and store.check([_FAILED]):
            report = store.get(_FAILED).decode()  # before the store closes
            self.own_fault, self.failed = report[0] == "1", report[1:]
        if self._group is not None:
            self._group.close()
        elif store is not None:
            Rendezvous.announce_departure(store)
        self._group = self._rendezvous = self._store = None


@dataclass(frozen=True)
class ReceiveOrder:
    """``near`` is the sender on the worker's GPU; if ``relayed``, other GPUs' messages come through it."""

    ends: list[move.MoveEnd]
    dtype: str
    limit: int
    transport: str = "gloo"
    alone: int = move.SINGLE_SEGMENT_BYTES
    near: int | None = None
    relayed: bool = False
    or_gloo: bool = False

    @staticmethod
    def key(rank: int) -> str:
        return f"order/{rank}"

    def encode(self) -> bytes:
        # of many experts it is more than the 8 MiB that a TCPStore takes
        return zlib.compress(_ORDERS.dump_json(self), level=1)

    @staticmethod
    def decode(data: bytes) -> ReceiveOrder:
        return _ORDERS.validate_json(zlib.decompress(data))

    @property
    def wire(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @cached_property
    def incoming(self) -> move.Queues:
        return move.queues(self.ends, itemsize=self.wire.itemsize, limit=self.limit, alone=self.alone)

    @property
    def writers(self) -> dict[int, int]:
        """Source → the sender that is on the worker's GPU."""
        return {
            source: self.near for source in self.incoming if self.near is not None and (self.relayed or source == self.near)
        }


_ORDERS = TypeAdapter(ReceiveOrder)
