"""Messages within a GPU that trainer and worker share, through CUDA IPC; all others through gloo. Not run on a GPU yet.

A sender has, for each rank on its GPU, two slots that the receiver opens once, when the group is made. A message is copied
into a slot, gloo tells the receiver so, the receiver copies it out and tells the sender, which only then uses the slot again.
The words over gloo also make a time-out or the death of either side an error of the other.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tepo_megatron.bridge.transfer.messages import WINDOW
from tepo_megatron.bridge.transfer.transport import give_up
from tepo_megatron.bridge.transfer.transports.gloo import GlooGroup

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Handles(Protocol):
    """How memory of a GPU becomes visible to another process; what crosses is JSON."""

    def place(self, device: torch.device) -> dict[str, str]:
        """What both sides must agree on: the host and the GPU, by names that no other has."""

    def export(self, slots: Tensor) -> dict[str, Any]:
        """A handle of a tensor's whole storage, which must stay alive."""

    def open(self, handle: dict[str, Any], device: torch.device) -> torch.UntypedStorage:
        """The same memory, in the process that has the handle."""

    def settle(self, device: torch.device) -> None:
        """Returns when all copies that were started have been made, so that another process may look."""


class CudaHandles:
    """CUDA's own, by the functions that torch.multiprocessing stands on, without its pickle."""

    _BYTES = ("handle", "counter", "event")

    def place(self, device: torch.device) -> dict[str, str]:
        return {"host": _host(), "gpu": str(torch.cuda.get_device_properties(device).uuid)}

    def export(self, slots: Tensor) -> dict[str, Any]:
        _, handle, size, offset, counter, counter_offset, event, must_sync = slots.untyped_storage()._share_cuda_()
        raw = dict(zip(self._BYTES, (bytes(part).hex() for part in (handle, counter, event)), strict=True))
        return raw | {"size": size, "offset": offset, "counter_offset": counter_offset, "must_sync": bool(must_sync)}

    def open(self, handle: dict[str, Any], device: torch.device) -> torch.UntypedStorage:
        raw, counter, event = (bytes.fromhex(handle[name]) for name in self._BYTES)
        return torch.UntypedStorage._new_shared_cuda(
            device.index, raw, handle["size"], handle["offset"], counter, handle["counter_offset"], event, handle["must_sync"]
        )

    def settle(self, device: torch.device) -> None:
        torch.cuda.current_stream(device).synchronize()


def _host() -> str:
    """A name of this machine that no other has, the same in all its containers; a new one after each start."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()


@dataclass(frozen=True)
class _Given:
    """A message in a slot: the word that it is there, and the word that it was taken."""

    full: Any
    taken: Any


@dataclass(frozen=True)
class _Awaited:
    """A message that is to come, where it goes, and the word that it is in its slot."""

    data: Tensor
    full: Any


class IpcGroup:
    """Routes by peer: ranks in ``given`` and ``taken``, whose slots these are, through them; all others through ``gloo``.

    Slots are uint8 [WINDOW, bytes]. It is a ``bridge.transfer.transport.Group``.
    """

    def __init__(
        self, gloo: GlooGroup, device: torch.device, handles: Handles, given: Mapping[int, Tensor], taken: Mapping[int, Tensor]
    ) -> None:
        self._gloo, self._device, self._handles = gloo, device, handles
        self._given, self._taken = dict(given), dict(taken)
        self._pending: dict[tuple[int, int], _Given | _Awaited] = {}
        self.cancelled: Callable[[], bool] = lambda: False

    def device(self, peer: int) -> torch.device:
        return self._device if peer in self._given or peer in self._taken else self._gloo.device(peer)

    def together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def send(self, data: Tensor, peer: int, number: int) -> None:
        """Start to send; to a rank on the same GPU the data is copied at once."""
        if peer not in self._given:
            self._gloo.send(data, peer, number)
            return
        _part(self._given[peer], number, data).copy_(data.view(torch.uint8))
        self._handles.settle(self._device)
        full = self._gloo.start_send(_word(), peer, number)
        self._pending[peer, number] = _Given(full, self._gloo.start_receive(_word(), peer, number))

    def receive(self, data: Tensor, peer: int, number: int) -> None:
        """Start to receive; from a rank on the same GPU ``data`` is filled by :meth:`finish`."""
        if peer not in self._taken:
            self._gloo.receive(data, peer, number)
            return
        self._pending[peer, number] = _Awaited(data, self._gloo.start_receive(_word(), peer, number))

    def finish(self, peer: int, number: int) -> None:
        """Wait for a message. Raises RuntimeError if it takes longer than the time-out, or the peer has left."""
        pending = self._pending.pop((peer, number), None)
        if pending is None:
            self._gloo.finish(peer, number)
            return
        pending.full.wait()
        if isinstance(pending, _Given):
            pending.taken.wait()
        else:
            pending.data.view(torch.uint8).copy_(_part(self._taken[peer], number, pending.data))
            self._handles.settle(self._device)
            self._gloo.start_send(_word(), peer, number).wait()

    def close(self) -> None:
        """Leave the group; the other members' pending operations fail."""
        self._gloo.close()
        self._pending, self._given, self._taken = {}, {}, {}


def join_ipc(
    enter: Callable[[], GlooGroup],
    store: TCPStore,
    rank: int,
    device: torch.device,
    *,
    gives: Mapping[int, int],
    takes: Sequence[int],
    handles: Handles | None = None,
) -> IpcGroup:
    """Hands over the handles of the slots through ``store``; ``gives`` maps a rank to the bytes of its largest message.

    ``enter`` enters gloo's group when all members have come: each offers its slots before, so that nobody waits for an offer
    that does not come. Raises RuntimeError where sender and receiver are not on one host and GPU.
    """
    handles = handles or CudaHandles()
    try:
        given = {peer: torch.empty(WINDOW, size, dtype=torch.uint8, device=device) for peer, size in gives.items()}
        for peer, slots in given.items():
            offer = {"place": handles.place(device), "bytes": gives[peer], "handle": handles.export(slots)}
            store.set(_key(rank, peer), json.dumps(offer))
    except BaseException:
        give_up(store)
        raise
    gloo = enter()
    try:
        taken = {peer: _open(json.loads(store.get(_key(peer, rank))), peer, rank, device, handles) for peer in takes}
    except BaseException:
        gloo.close()
        raise
    return IpcGroup(gloo, device, handles, given, taken)


def _open(offer: dict[str, Any], sender: int, receiver: int, device: torch.device, handles: Handles) -> Tensor:
    there, here = offer["place"], handles.place(device)
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


def _part(slots: Tensor, number: int, data: Tensor) -> Tensor:
    return slots[number % WINDOW, : data.nbytes]


def _word() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8)
