"""Messages through CUDA IPC between trainer and worker on one GPU (decision 009)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from tepo_megatron.runtime.proc import boot_id
from tepo_megatron.weights.geometry import ReshardPlan
from tepo_megatron.weights.transfer.move import WINDOW, MoveEnd, message_sizes, queues
from tepo_megatron.weights.transfer.transport import (
    Member,
    RelayRoutes,
    Rendezvous,
    TransferError,
    TransferGroup,
    TransportSpec,
)
from tepo_megatron.weights.transfer.transports import nccl
from tepo_megatron.weights.transfer.transports.gloo import GlooGroup


class _IpcGroup(TransferGroup):
    """``written`` is by (source, worker), ``read`` by source."""

    def __init__(
        self,
        gloo: GlooGroup,
        member: Member,
        handles: _CudaHandles,
        written: Mapping[tuple[int, int], _Slots],
        read: Mapping[int, _Slots],
        relay: _Relay | None,
    ) -> None:
        self._gloo, self._rank, self._device, self._handles = gloo, member.rank, member.device, handles
        self._written, self._read, self._relay = dict(written), dict(read), relay
        self._via, self.rounds = member.routes.via, member.routes.rounds
        self._pending: dict[tuple[int, int], Callable[[], None]] = {}
        if relay is not None:  # gloo's waits end by themselves
            relay.leg.cancelled = lambda: self.cancelled()

    def device(self, peer: int) -> torch.device:
        has_slots = (self._rank, peer) in self._written or peer in self._read
        return self._device if has_slots else self._carrier(peer).device(peer)

    def round(self) -> AbstractContextManager[None]:
        return nullcontext() if self._relay is None else self._relay.round()

    def _carrier(self, peer: int) -> GlooGroup | _Relay:
        return self._gloo if self._relay is None or peer not in self._via else self._relay

    def send(self, data: Tensor, peer: int, number: int) -> None:
        """Data for a rank on the same GPU is copied at once."""
        slots = self._written.get((self._rank, peer))
        if slots is None:
            self._carrier(peer).send(data, peer, number)
            return
        # The slot is free: the wait for message number - WINDOW, which used it, includes the signal that it was read.
        slots.part(number, data.nbytes).copy_(data.view(torch.uint8))
        self._handles.synchronize(self._device)  # gloo's signal does not wait for the GPU
        signals = slots.notify(number), slots.listen(number)
        self._pending[peer, number] = lambda: _wait_for(signals)

    def receive(self, data: Tensor, peer: int, number: int) -> None:
        """Data from slots is complete after ``wait``."""
        slots = self._read.get(peer)
        if slots is None:
            self._gloo.receive(data, peer, number)
            return
        written = slots.listen(number)

        def finish() -> None:
            written.wait()
            data.view(torch.uint8).copy_(slots.part(number, data.nbytes))
            self._handles.synchronize(self._device)  # the sender may overwrite the slot as soon as it has the signal
            slots.notify(number).wait()

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
        self._pending, self._written, self._read, self._relay = {}, {}, {}, None


@dataclass(frozen=True)
class _Slots:
    """``memory``, uint8 [WINDOW, bytes], holds messages of ``source`` and is also open in the process of ``peer``.

    A byte over gloo signals that a message is in its slot, or was copied out.
    """

    memory: Tensor
    gloo: GlooGroup
    peer: int
    source: int
    world_size: int

    def part(self, number: int, nbytes: int) -> Tensor:
        return self.memory[number % WINDOW, :nbytes]

    def notify(self, number: int) -> Any:
        return self.gloo.start_send(torch.zeros(1, dtype=torch.uint8), self.peer, number * self.world_size + self.source)

    def listen(self, number: int) -> Any:
        return self.gloo.start_receive(torch.zeros(1, dtype=torch.uint8), self.peer, number * self.world_size + self.source)


def _wait_for(signals: Iterable[Any]) -> None:
    for signal in signals:
        signal.wait()


def _join(store: Store, member: Member, timeout_s: float) -> _IpcGroup:
    """Gloo carries all but the slots. NCCL connects the trainer's ranks if they relay."""
    handles, rank, world_size, routes = _CudaHandles(), member.rank, member.world_size, member.routes
    sizes = {(rank, worker): size for worker, size in member.same_gpu_receivers.items()}
    sizes |= {pair: max(messages) for pair, messages in routes.forwards.items()}
    try:
        offered = {pair: _offer(store, pair, size, member.device, handles) for pair, size in sizes.items()}
    except BaseException:
        Rendezvous.announce_departure(store)
        raise
    # gloo's group forms when all members are there, and each has made its offers before: no get below waits for a missing one.
    gloo = GlooGroup(store, member.address, rank, world_size, timeout_s)
    try:
        written = {pair: _Slots(memory, gloo, pair[1], pair[0], world_size) for pair, memory in offered.items()}
        read = {
            source: _Slots(_open(store, source, writer, member, handles), gloo, writer, source, world_size)
            for source, writer in member.writers.items()
        }
        relay = None
        if routes.sources:
            leg = nccl.TRANSPORT.join(PrefixStore("relay", store), replace(member, world_size=routes.sources), timeout_s)
            relay = _Relay(member, leg, written, handles)
    except BaseException:
        gloo.close()
        raise
    return _IpcGroup(gloo, member, handles, written, read, relay)


TRANSPORT = TransportSpec(join=_join, requires_gpu=True, staging_bytes=2**30, fills=True)


def _offer(store: Store, pair: tuple[int, int], size: int, device: torch.device, handles: _CudaHandles) -> Tensor:
    slots = torch.empty(WINDOW, size, dtype=torch.uint8, device=device)
    offer = {"location": handles.location(device), "bytes": size, "handle": handles.export(slots)}
    store.set(_key(*pair), json.dumps(offer))
    return slots


def _open(store: Store, source: int, writer: int, member: Member, handles: _CudaHandles) -> Tensor:
    offer = json.loads(store.get(_key(source, member.rank)))
    for what, local in handles.location(member.device).items():
        if offer["location"][what] != local:
            raise RuntimeError(
                f"rollout.server.transport = ipc, but rank {writer} of the weight-transfer group is on {what} "
                f"{offer['location'][what]}, rank {member.rank} on {what} {local}; CUDA IPC needs trainer and server on the "
                "same GPU: set rollout.server.placement = colocated, or another transport"
            )
    storage = handles.open(offer["handle"], member.device)
    slots = torch.empty(0, dtype=torch.uint8, device=member.device)
    return slots.set_(storage, 0, (WINDOW, offer["bytes"]))  # type: ignore[call-overload]


def _key(source: int, worker: int) -> str:
    return f"ipc/{source}/{worker}"


class _CudaHandles:
    _BYTES = ("handle", "counter", "event")

    def location(self, device: torch.device) -> dict[str, str]:
        """Names of host and GPU."""
        return {"host": boot_id(), "gpu": str(torch.cuda.get_device_properties(device).uuid)}

    def export(self, slots: Tensor) -> dict[str, Any]:
        """The handle is of the whole storage: keep it alive."""
        _, handle, size, offset, counter, counter_offset, event, must_sync = slots.untyped_storage()._share_cuda_()
        raw = dict(zip(self._BYTES, (bytes(part).hex() for part in (handle, counter, event)), strict=True))
        return raw | {"size": size, "offset": offset, "counter_offset": counter_offset, "must_sync": bool(must_sync)}

    def open(self, handle: dict[str, Any], device: torch.device) -> torch.UntypedStorage:
        raw, counter, event = (bytes.fromhex(handle[name]) for name in self._BYTES)
        return torch.UntypedStorage._new_shared_cuda(
            device.index, raw, handle["size"], handle["offset"], counter, handle["counter_offset"], event, handle["must_sync"]
        )

    def synchronize(self, device: torch.device) -> None:
        """Afterwards another process may read the copies."""
        torch.cuda.current_stream(device).synchronize()


def source_routes(plan: ReshardPlan, rank: int, **sizes: int) -> RelayRoutes:
    """``sizes``: see ``queues``."""
    near = {plan.num_sources + to: source for to, source in plan.local.items()}
    outgoing = [queues(MoveEnd.of(plan, source), **sizes) for source in range(plan.num_sources)]
    relayed = {
        (source, to): message_sizes(queue, sizes["itemsize"])
        for source, by_peer in enumerate(outgoing)
        for to, queue in by_peer.items()
        if near.get(to, source) != source
    }
    if not relayed:
        return RelayRoutes()
    return RelayRoutes(
        via={to: near[to] for source, to in relayed if source == rank},
        forwards={pair: sizes for pair, sizes in relayed.items() if near[pair[1]] == rank},
        sources=plan.num_sources,
        rounds=max(len(queue) for by_peer in outgoing for queue in by_peer.values()),
    )


class _Relay:
    """``leg`` connects the trainer's ranks, which all exchange in every round; ``slots``: by (source, worker)."""

    def __init__(
        self, member: Member, leg: TransferGroup, slots: Mapping[tuple[int, int], _Slots], handles: _CudaHandles
    ) -> None:
        self.leg = leg
        self._member, self._routes, self._slots, self._handles = member, member.routes, slots, handles
        self._round = 0
        self._sending: list[tuple[Tensor, int, int]] = []
        self._arriving: list[tuple[int, int, int]] = []
        self._signals: dict[tuple[int, int, int], tuple[Any, ...]] = {}

    @contextmanager
    def round(self) -> Iterator[None]:
        """Sends of its block travel when it ends."""
        yield
        self.settle()
        incoming = list(self._incoming())
        for source, worker, number in incoming:
            self._await_taken((source, worker, number - WINDOW))
        sending, self._sending = self._sending, []
        if sending or incoming:
            with self.leg.round():  # both ends of a pair start by the worker's number: NCCL matches by order
                for data, worker, number in sorted(sending, key=lambda item: item[1:]):
                    self.leg.send(data.view(torch.uint8), *self._outgoing(worker, number))
                for source, worker, number in incoming:
                    size = self._routes.forwards[source, worker][number]
                    part = self._slots[source, worker].part(number, size)
                    self.leg.receive(part, source, self._tag(number, worker, source, self._member.rank))
        self._arriving = incoming
        if self._round == self._routes.rounds:
            self.settle()
        self._round += 1

    def _incoming(self) -> Iterator[tuple[int, int, int]]:
        """Yields source, worker and number; digests are in the last round."""
        for source, worker in sorted(self._routes.forwards, key=lambda pair: pair[::-1]):
            digests = len(self._routes.forwards[source, worker]) - 1
            if self._round == self._routes.rounds or self._round < digests:
                yield source, worker, min(self._round, digests)

    def device(self, worker: int) -> torch.device:
        return self.leg.device(self._routes.via[worker])

    def send(self, data: Tensor, worker: int, number: int) -> None:
        self._sending.append((data, worker, number))

    def wait(self, worker: int, number: int) -> None:
        self.leg.wait(*self._outgoing(worker, number))

    def settle(self) -> None:
        """Call it before other waits: workers wait for the notification."""
        arriving, self._arriving = self._arriving, []
        for source, worker, number in arriving:
            with _naming("receiving", source, worker):
                self.leg.wait(source, self._tag(number, worker, source, self._member.rank))
        if arriving:
            self._handles.synchronize(self._member.device)
        for source, worker, number in arriving:
            slots = self._slots[source, worker]
            self._signals[source, worker, number] = slots.notify(number), slots.listen(number)

    def finish(self) -> None:
        for message in list(self._signals):
            self._await_taken(message)
        self._round = 0

    def _await_taken(self, message: tuple[int, int, int]) -> None:
        source, worker, _ = message
        with _naming("passing on", source, worker):
            _wait_for(self._signals.pop(message, ()))

    def _outgoing(self, worker: int, number: int) -> tuple[int, int]:
        via = self._routes.via[worker]
        return via, self._tag(number, worker, self._member.rank, via)

    def _tag(self, number: int, worker: int, source: int, to: int) -> int:
        return (number * self._member.world_size + worker) * 2 + (source > to)


@contextmanager
def _naming(what: str, source: int, worker: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TransferError(f"{what} a message from rank {source} to rank {worker} failed: {error}") from error
