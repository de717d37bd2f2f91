"""Messages through CUDA IPC between trainer and worker on one GPU (decision 009). Not run on a GPU yet."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from tepo_megatron.runtime.proc import boot_id
from tepo_megatron.weights.geometry import ReshardPlan
from tepo_megatron.weights.transfer.move import WINDOW, Queues, message_sizes, queues, source_ends
from tepo_megatron.weights.transfer.transport import Member, RelayRoutes, TransferGroup, TransportSpec, announce_departure
from tepo_megatron.weights.transfer.transports.gloo import GlooGroup
from tepo_megatron.weights.transfer.transports.nccl import join_nccl


class IpcGroup:
    """Slots are uint8 [WINDOW, bytes]; the rank ``via`` of a peer on another GPU fills its slots."""

    def __init__(
        self,
        gloo: GlooGroup,
        member: Member,
        handles: _MemoryHandles,
        send_slots: Mapping[int, Tensor],
        receive_slots: Mapping[int, Tensor],
        relay: _Relay | None = None,
    ) -> None:
        self._gloo, self._rank, self._device, self._handles = gloo, member.rank, member.device, handles
        self._send_slots, self._receive_slots = dict(send_slots), dict(receive_slots)
        self._via, self._relay = member.routes.via, relay
        self._signals = _SlotSignals(gloo, member.world_size)
        self._pending: dict[tuple[int, int], Callable[[], None]] = {}
        self.cancelled: Callable[[], bool] = lambda: False
        if relay is not None:  # gloo's waits end by themselves
            relay.leg.cancelled = lambda: self.cancelled()

    def device(self, peer: int) -> torch.device:
        has_slots = peer in self._send_slots or peer in self._receive_slots
        return self._device if has_slots else self._carrier(peer).device(peer)

    def round(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._relay is None else self._relay.turn()

    def _carrier(self, peer: int) -> GlooGroup | _Relay:
        """Carries messages to and from a peer without slots."""
        return self._gloo if self._relay is None or peer not in self._via else self._relay

    def send(self, data: Tensor, peer: int, number: int) -> None:
        """Data for a rank on the same GPU is copied at once."""
        if peer not in self._send_slots:
            self._carrier(peer).send(data, peer, number)
            return
        # The slot is free: the wait for message number - WINDOW, which used it, includes the signal that it was read.
        _slot(self._send_slots[peer], number, data).copy_(data.view(torch.uint8))
        self._handles.synchronize(self._device)  # gloo's signal does not wait for the GPU
        written = self._signals.start_notify(peer, number, self._rank)
        read = self._signals.start_wait(peer, number, self._rank)

        def finish() -> None:
            written.wait()
            read.wait()

        self._pending[peer, number] = finish

    def receive(self, data: Tensor, peer: int, number: int) -> None:
        """Data from slots is complete after :meth:`wait`."""
        if peer not in self._receive_slots:
            self._gloo.receive(data, peer, number)
            return
        writer = self._via.get(peer, peer)
        written = self._signals.start_wait(writer, number, peer)

        def finish() -> None:
            written.wait()
            data.view(torch.uint8).copy_(_slot(self._receive_slots[peer], number, data))
            self._handles.synchronize(self._device)  # the sender may overwrite the slot as soon as it has the signal
            self._signals.start_notify(writer, number, peer).wait()

        self._pending[peer, number] = finish

    def wait(self, peer: int, number: int) -> None:
        if self._relay is not None:
            self._relay.settle()  # the worker may wait for others' messages before it takes this rank's
        finish = self._pending.pop((peer, number), None)
        if finish is not None:
            finish()
        else:
            self._carrier(peer).wait(peer, number)

    def finish(self) -> None:
        if self._relay is not None:
            self._relay.finish()

    def close(self) -> None:
        if self._relay is not None and self._relay.leg is not self._gloo:
            self._relay.leg.close()
        self._gloo.close()
        self._pending, self._send_slots, self._receive_slots, self._relay = {}, {}, {}, None


def join_ipc(
    join_gloo: Callable[[], GlooGroup],
    store: Store,
    member: Member,
    *,
    join_leg: Callable[[GlooGroup], TransferGroup],
    handles: _MemoryHandles | None = None,
) -> IpcGroup:
    """The gloo group carries all but the slots; ``join_leg`` joins the trainer ranks' group, which relays."""
    handles, rank, routes = handles or _CudaHandles(), member.rank, member.routes
    try:
        send_slots = {
            peer: _offer(store, (rank, peer, rank), size, member, handles) for peer, size in member.same_gpu_receivers.items()
        }
        relay_slots = {
            (source, worker): _offer(store, (rank, worker, source), max(sizes), member, handles)
            for (source, worker), sizes in routes.forwards.items()
        }
    except BaseException:
        announce_departure(store)
        raise
    # gloo's group forms when all members are there, and each has made its offers before: no get below waits for a missing one.
    gloo = join_gloo()
    try:
        through = () if routes.sources else routes.via  # a trainer rank receives nothing
        writers = {source: routes.via.get(source, source) for source in (*member.same_gpu_senders, *through)}
        receive_slots: dict[int, Tensor] = {}
        for source, writer in writers.items():
            offer = json.loads(store.get(_key(writer, rank, source)))
            receive_slots[source] = _open(offer, writer, member, handles)
        relay = None
        if routes.sources:
            signals = _SlotSignals(gloo, member.world_size)
            relay = _Relay(rank, routes, join_leg(gloo), signals, relay_slots, lambda: handles.synchronize(member.device))
    except BaseException:
        gloo.close()
        raise
    return IpcGroup(gloo, member, handles, send_slots, receive_slots, relay)


def _join(store: Store, member: Member, timeout_s: float) -> IpcGroup:
    def join_gloo() -> GlooGroup:
        return GlooGroup(store, member.address, member.rank, member.world_size, timeout_s)

    def join_leg(gloo: GlooGroup) -> TransferGroup:
        return join_nccl(PrefixStore("relay", store), replace(member, world_size=member.routes.sources), timeout_s)

    return join_ipc(join_gloo, store, member, join_leg=join_leg)


TRANSPORT = TransportSpec(join=_join, requires_gpu=True)


def _offer(store: Store, key: tuple[int, int, int], size: int, member: Member, handles: _MemoryHandles) -> Tensor:
    slots = torch.empty(WINDOW, size, dtype=torch.uint8, device=member.device)
    offer = {"location": handles.location(member.device), "bytes": size, "handle": handles.export(slots)}
    store.set(_key(*key), json.dumps(offer))
    return slots


def _open(offer: dict[str, Any], sender: int, member: Member, handles: _MemoryHandles) -> Tensor:
    sender_location, local_location = offer["location"], handles.location(member.device)
    for what in ("host", "gpu"):
        if sender_location[what] != local_location[what]:
            raise RuntimeError(
                f"rollout.server.transport = ipc, but rank {sender} of the weight-transfer group is on {what} "
                f"{sender_location[what]}, rank {member.rank} on {what} {local_location[what]}; CUDA IPC needs trainer "
                "and server on the same GPU: set "
                "rollout.server.placement = colocated, or another transport"
            )
    storage = handles.open(offer["handle"], member.device)
    slots = torch.empty(0, dtype=torch.uint8, device=member.device)
    return slots.set_(storage, 0, (WINDOW, offer["bytes"]))  # type: ignore[call-overload]


def _key(writer: int, receiver: int, source: int) -> str:
    return f"ipc/{writer}/{receiver}/{source}"


def _slot(slots: Tensor, number: int, data: Tensor) -> Tensor:
    return slots[number % WINDOW, : data.nbytes]


class _MemoryHandles(Protocol):
    def location(self, device: torch.device) -> dict[str, str]:
        """Names of host and GPU."""

    def export(self, slots: Tensor) -> dict[str, Any]:
        """The handle is of the whole storage, which must stay alive."""

    def open(self, handle: dict[str, Any], device: torch.device) -> torch.UntypedStorage: ...

    def synchronize(self, device: torch.device) -> None:
        """Afterwards another process may read the copies."""


class _CudaHandles:
    _BYTES = ("handle", "counter", "event")

    def location(self, device: torch.device) -> dict[str, str]:
        return {"host": boot_id(), "gpu": str(torch.cuda.get_device_properties(device).uuid)}

    def export(self, slots: Tensor) -> dict[str, Any]:
        _, handle, size, offset, counter, counter_offset, event, must_sync = slots.untyped_storage()._share_cuda_()
        raw = dict(zip(self._BYTES, (bytes(part).hex() for part in (handle, counter, event)), strict=True))
        return raw | {"size": size, "offset": offset, "counter_offset": counter_offset, "must_sync": bool(must_sync)}

    def open(self, handle: dict[str, Any], device: torch.device) -> torch.UntypedStorage:
        raw, counter, event = (bytes.fromhex(handle[name]) for name in self._BYTES)
        return torch.UntypedStorage._new_shared_cuda(
            device.index, raw, handle["size"], handle["offset"], counter, handle["counter_offset"], event, handle["must_sync"]
        )

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.current_stream(device).synchronize()


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


@dataclass(frozen=True)
class _SlotSignals:
    """One byte over gloo: a message is in its slot, or was copied out."""

    gloo: GlooGroup
    world_size: int

    def start_notify(self, peer: int, number: int, source: int) -> Any:
        return self.gloo.start_send(torch.zeros(1, dtype=torch.uint8), peer, number * self.world_size + source)

    def start_wait(self, peer: int, number: int, source: int) -> Any:
        return self.gloo.start_receive(torch.zeros(1, dtype=torch.uint8), peer, number * self.world_size + source)


@dataclass
class _Relay:
    """``slots``: (source, worker) → uint8 [WINDOW, bytes], open in the worker. ``leg`` connects the trainer's ranks."""

    rank: int
    routes: RelayRoutes
    leg: TransferGroup
    signals: _SlotSignals
    slots: Mapping[tuple[int, int], Tensor]
    synchronize: Callable[[], None]
    _turn: int = 0
    _sending: list[tuple[Tensor, int, int]] = field(default_factory=list)
    _arriving: list[tuple[int, int, int]] = field(default_factory=list)
    _taken: dict[tuple[int, int, int], list[Any]] = field(default_factory=dict)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Sends of its block travel when it ends."""
        turn = self._turn if self._turn < self.routes.local_rounds else self.routes.rounds
        self._catch_up(turn)
        yield
        self._exchange(turn)

    def device(self, worker: int) -> torch.device:
        return self.leg.device(self.routes.via[worker])

    def send(self, data: Tensor, worker: int, number: int) -> None:
        self._sending.append((data, worker, number))

    def wait(self, worker: int, number: int) -> None:
        self.settle()
        via = self.routes.via[worker]
        self.leg.wait(via, self._tag(number, worker, self.rank, via))

    def settle(self) -> None:
        """Call it before other waits: workers wait for the notification."""
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
