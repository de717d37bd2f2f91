"""The gloo group of trainer and rollout workers, apart from torch's default one: point-to-point messages and broadcasts.

Both sides import this module, so it knows neither Megatron nor vLLM. The trainer's ranks come first, the workers of all servers
follow. Shards travel point to point (``bridge.move``). :func:`send` and :func:`receive` are the plain way beside it: full
tensors from rank 0 to everybody, in buckets that both sides derive from the same manifest.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

BACKEND = "tepo_gloo"
"""The name under which the plugin registers the receiving engine with vLLM."""

BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 16
"""Every tensor starts at a multiple of this in its bucket: no less than the item size of any dtype."""

POLL_S = 1e-4

CLOSE_GRACE_S = 2.0
"""How long leaving a group is waited for: an interpreter that ends in the middle of it aborts the process."""

Manifest = Sequence[tuple[str, Sequence[int], str]]
"""What is going to be sent, in order: (name, shape, name of the torch dtype such as ``"float32"``)."""


@dataclass(frozen=True)
class Entry:
    """A tensor of the manifest and where it starts in its bucket, in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, bucket: Tensor) -> Tensor:
        """The tensor within a uint8 bucket, without a copy."""
        return bucket[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


def buckets(manifest: Manifest, limit: int = BUCKET_BYTES) -> list[list[Entry]]:
    """Split a manifest into runs that share one message of at most ``limit`` bytes; a larger tensor gets its own.

    Raises ValueError for a dtype that torch does not have, and for a name that occurs twice.
    """
    runs: list[list[Entry]] = []
    end, names = 0, set[str]()
    for name, shape, dtype_name in manifest:
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"tensor {name!r} of the weights manifest has the unknown dtype {dtype_name!r}; use a torch dtype name"
            )
        if name in names:
            raise ValueError(f"tensor {name!r} occurs twice in the weights manifest; every name may be sent once")
        names.add(name)
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        size = math.prod(shape) * dtype.itemsize
        if not runs or offset + size > limit:
            runs.append([])
            offset = 0
        runs[-1].append(Entry(name, tuple(shape), dtype, offset))
        end = offset + size
    return runs


def listen(host: str) -> tuple[TCPStore, int]:
    """Open the store at which a group meets, on a free port of the address ``host`` only; returns it and the port."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        port = server.getsockname()[1]
        store = TCPStore(host, port, None, True, timedelta(seconds=60), False, master_listen_fd=server.detach())
    return store, port


def connect(host: str, port: int, timeout_s: float) -> TCPStore:
    """Reach the store that the trainer opened with :func:`listen`."""
    return TCPStore(host, port, None, False, timedelta(seconds=timeout_s), False)


def own_address(host: str, port: int) -> str:
    """The address of this machine that reaches ``host``, and by which ``host`` reaches it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect((host, port))
        return str(probe.getsockname()[0])


class TransferGroup:
    """The trainer's ranks and all workers that receive its weights. Making it returns when all members have come.

    ``host`` names the interface whose address this member offers to the others. Every operation is bounded by ``timeout_s``
    seconds. Raises RuntimeError if the others do not come in that time. It is a ``bridge.move.Transport``.
    """

    def __init__(self, store: TCPStore, host: str, rank: int, world_size: int, timeout_s: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # a constructor without them would not take a host
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        self._group: Any = ProcessGroupGloo(store, rank, world_size, options)
        self._pending: dict[tuple[int, int], Any] = {}

    def send(self, data: Tensor, peer: int, number: int) -> None:
        """Start to send a contiguous CPU tensor to ``peer``; it must not change until :meth:`finish`."""
        self._pending[peer, number] = self._group.send([data], peer, number)

    def receive(self, data: Tensor, peer: int, number: int) -> None:
        """Start to fill a contiguous CPU tensor with the message ``number`` of ``peer``."""
        self._pending[peer, number] = self._group.recv([data], peer, number)

    def finish(self, peer: int, number: int) -> None:
        """Wait for a message. Raises RuntimeError if it takes longer than the time-out, or the peer has left."""
        self._pending.pop((peer, number)).wait()

    def broadcast(self, tensor: Tensor, cancelled: Callable[[], bool]) -> None:
        """Fill ``tensor`` with rank 0's on every rank. Raises RuntimeError on failure, time-out and when ``cancelled()``."""
        work = self._group.broadcast(tensor, 0)
        while not work.is_completed():  # a wait() could not be interrupted: gloo cannot abort
            if cancelled():
                raise RuntimeError("a receiver failed")
            time.sleep(POLL_S)
        work.wait()

    def close(self) -> None:
        """Leave the group; the other members' pending operations fail.

        Destroying a gloo group waits for its own pending operations, up to their time-out, so a thread does it. They go first:
        each of them holds the connections open.
        """
        keep, self._group, self._pending = [*self._pending.values(), self._group], None, {}
        closing = threading.Thread(target=keep.clear, name="close-transfer-group", daemon=True)
        closing.start()
        closing.join(CLOSE_GRACE_S)


def send(
    group: TransferGroup,
    manifest: Manifest,
    tensors: Iterable[Tensor],
    *,
    cancelled: Callable[[], bool] = lambda: False,
    limit: int = BUCKET_BYTES,
) -> None:
    """Broadcast ``tensors``, which must be those of the manifest in its order, from rank 0; blocks until they are sent.

    ``cancelled`` is asked while a message waits for its receivers. Raises ValueError where a tensor does not match the
    manifest, RuntimeError naming the tensors of the message when the broadcast fails, times out or is cancelled.
    """
    stream = iter(tensors)
    for run in buckets(manifest, limit):
        bucket = torch.empty(run[-1].offset + run[-1].nbytes, dtype=torch.uint8)
        for entry in run:
            tensor = next(stream, None)
            if tensor is None:
                raise ValueError(f"the weights end before tensor {entry.name!r}, which the manifest announces")
            if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
                raise ValueError(
                    f"tensor {entry.name!r} is {tensor.dtype} {tuple(tensor.shape)}, but the manifest announces "
                    f"{entry.dtype} {entry.shape}"
                )
            entry.view(bucket).copy_(tensor.detach())
        _broadcast(group, run, bucket, cancelled)
    if next(stream, None) is not None:
        raise ValueError(f"there are more tensors than the {len(manifest)} that the manifest announces")


def receive(group: TransferGroup, manifest: Manifest, *, limit: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor on the CPU) as they arrive from rank 0, in the order of the manifest.

    The tensors of one message share memory that nothing else uses. Raises RuntimeError naming the tensors of the message when
    the broadcast fails or times out.
    """
    for run in buckets(manifest, limit):
        bucket = torch.empty(run[-1].offset + run[-1].nbytes, dtype=torch.uint8)
        _broadcast(group, run, bucket, lambda: False)
        for entry in run:
            yield entry.name, entry.view(bucket)


def _broadcast(group: TransferGroup, run: list[Entry], bucket: Tensor, cancelled: Callable[[], bool]) -> None:
    try:
        group.broadcast(bucket, cancelled)
    except RuntimeError as error:
        what = f"tensor {run[0].name!r}" if len(run) == 1 else f"tensors {run[0].name!r} to {run[-1].name!r}"
        raise RuntimeError(f"the transfer of {what} failed: {error}") from error
