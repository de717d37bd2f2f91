"""Messages within a GPU that trainer and worker share, through CUDA IPC; all others through gloo. Not run on a GPU yet.

A sender has, for each rank on its GPU, two slots that the receiver opens once, when the group is made. A message is copied into
a slot, a signal over gloo says that it is there, the receiver copies it out and signals back, and only then does the sender use
the slot again. The signals also make a time-out or the death of either side an error of the other.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from tepo_megatron.bridge.transfer.messages import WINDOW
from tepo_megatron.bridge.transfer.roll_call import host_name
from tepo_megatron.bridge.transfer.transport import Member, TransportSpec, announce_departure
from tepo_megatron.bridge.transfer.transports.gloo import GlooGroup


class Handles(Protocol):
    """Makes memory of a GPU visible to another process, by handles that are JSON."""

    def location(self, device: torch.device) -> dict[str, str]:
        """Returns unique names of the host and of the GPU, which must be the same on both sides."""

    def export(self, slots: Tensor) -> dict[str, Any]:
        """Returns a handle of a tensor's whole storage, which must stay alive."""

    def open(self, handle: dict[str, Any], device: torch.device) -> torch.UntypedStorage:
        """Returns the same memory in the process that has the handle."""

    def synchronize(self, device: torch.device) -> None:
        """Returns when all copies that were started have been made, so that another process may read them."""


class CudaHandles:
    """CUDA's IPC handles, made by the functions that torch.multiprocessing uses, without its pickle."""

    _BYTES = ("handle", "counter", "event")

    def location(self, device: torch.device) -> dict[str, str]:
        return {"host": host_name(), "gpu": str(torch.cuda.get_device_properties(device).uuid)}

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


@dataclass(frozen=True)
class _PendingSend:
    """A message in a slot, with the signal that it was written and the signal that it was read."""

    written: Any
    read: Any


@dataclass(frozen=True)
class _PendingReceive:
    """A message that is to come: the tensor that it goes into, and the signal that it was written into its slot."""

    data: Tensor
    written: Any


class IpcGroup:
    """Routes messages by peer: through slots to ``send_slots`` and from ``receive_slots``, through ``gloo`` otherwise.

    Slots are uint8 [WINDOW, bytes], by peer. It is a ``bridge.transfer.transport.Group``.
    """

    def __init__(
        self,
        gloo: GlooGroup,
        device: torch.device,
        handles: Handles,
        send_slots: Mapping[int, Tensor],
        receive_slots: Mapping[int, Tensor],
    ) -> None:
        self._gloo, self._device, self._handles = gloo, device, handles
        self._send_slots, self._receive_slots = dict(send_slots), dict(receive_slots)
        self._pending: dict[tuple[int, int], _PendingSend | _PendingReceive] = {}
        self.cancelled: Callable[[], bool] = lambda: False

    def device(self, peer: int) -> torch.device:
        return self._device if peer in self._send_slots or peer in self._receive_slots else self._gloo.device(peer)

    def round(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def send(self, data: Tensor, peer: int, number: int) -> None:
        """Starts to send; data for a rank on the same GPU is copied at once."""
        if peer not in self._send_slots:
            self._gloo.send(data, peer, number)
            return
        # The slot is free: the wait for message number - WINDOW, which had it, includes the signal that it was read.
        _slot(self._send_slots[peer], number, data).copy_(data.view(torch.uint8))
        self._handles.synchronize(self._device)  # gloo's signal does not wait for the GPU
        written = self._gloo.start_send(_signal(), peer, number)
        self._pending[peer, number] = _PendingSend(written, self._gloo.start_receive(_signal(), peer, number))

    def receive(self, data: Tensor, peer: int, number: int) -> None:
        """Starts to receive; from a rank on the same GPU ``data`` is filled by :meth:`wait`."""
        if peer not in self._receive_slots:
            self._gloo.receive(data, peer, number)
            return
        self._pending[peer, number] = _PendingReceive(data, self._gloo.start_receive(_signal(), peer, number))

    def wait(self, peer: int, number: int) -> None:
        """Waits for a message. Raises RuntimeError if it takes longer than the time-out, or the peer has left."""
        pending = self._pending.pop((peer, number), None)
        if pending is None:
            self._gloo.wait(peer, number)
            return
        pending.written.wait()
        if isinstance(pending, _PendingSend):
            pending.read.wait()
        else:
            pending.data.view(torch.uint8).copy_(_slot(self._receive_slots[peer], number, pending.data))
            self._handles.synchronize(self._device)  # the sender may overwrite the slot as soon as it has the signal
            self._gloo.start_send(_signal(), peer, number).wait()

    def close(self) -> None:
        """Leaves the group; the other members' pending operations fail."""
        self._gloo.close()
        self._pending, self._send_slots, self._receive_slots = {}, {}, {}


def join_ipc(
    join_gloo: Callable[[], GlooGroup],
    store: Store,
    rank: int,
    device: torch.device,
    *,
    receivers: Mapping[int, int],
    senders: Sequence[int],
    handles: Handles | None = None,
) -> IpcGroup:
    """Exchanges the handles of the slots through ``store``, and joins the group of gloo that carries everything else.

    ``receivers`` maps each rank on this GPU to which this one sends to the bytes of its largest message; ``senders`` are the
    ranks on this GPU from which it receives. Raises RuntimeError where sender and receiver are not on one host and GPU.
    """
    handles = handles or CudaHandles()
    try:
        send_slots = {peer: torch.empty(WINDOW, size, dtype=torch.uint8, device=device) for peer, size in receivers.items()}
        for peer, slots in send_slots.items():
            offer = {"location": handles.location(device), "bytes": receivers[peer], "handle": handles.export(slots)}
            store.set(_key(rank, peer), json.dumps(offer))
    except BaseException:
        announce_departure(store)
        raise
    # gloo's group forms when all members are there, and each has made its offers before: no get below waits for a missing one.
    gloo = join_gloo()
    try:
        receive_slots = {peer: _open(json.loads(store.get(_key(peer, rank))), peer, rank, device, handles) for peer in senders}
    except BaseException:
        gloo.close()
        raise
    return IpcGroup(gloo, device, handles, send_slots, receive_slots)


def _join(store: Store, member: Member, timeout_s: float) -> IpcGroup:
    def join_gloo() -> GlooGroup:
        return GlooGroup(store, member.address, member.rank, member.world_size, timeout_s)

    receivers, senders = member.same_gpu_receivers, member.same_gpu_senders
    return join_ipc(join_gloo, store, member.rank, member.device, receivers=receivers, senders=senders)


TRANSPORT = TransportSpec(join=_join, requires_gpu=True)


def _open(offer: dict[str, Any], sender: int, receiver: int, device: torch.device, handles: Handles) -> Tensor:
    """Opens the slots of a sender: uint8 [WINDOW, bytes]."""
    there, here = offer["location"], handles.location(device)
    for what in ("host", "gpu"):
        if there[what] != here[what]:
            raise RuntimeError(
                f"rollout.server.transport = ipc, but rank {sender} of the weight-transfer group is on {what} {there[what]}, "
                f"rank {receiver} on {what} {here[what]}; CUDA IPC needs trainer and server on the same GPU: set "
                "rollout.server.placement = colocated, or another transport"
            )
    storage = handles.open(offer["handle"], device)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (WINDOW, offer["bytes"]))  # type: ignore[call-overload]


def _key(sender: int, receiver: int) -> str:
    return f"ipc/{sender}/{receiver}"


def _slot(slots: Tensor, number: int, data: Tensor) -> Tensor:
    return slots[number % WINDOW, : data.nbytes]


def _signal() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8)
