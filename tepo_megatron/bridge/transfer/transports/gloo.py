"""Messages and broadcasts over gloo, through the memory of the hosts; apart from torch's default group."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from tepo_megatron.bridge.transfer.transport import Meeting

POLL_S = 1e-4

CLOSE_GRACE_S = 2.0
"""How long leaving a group is waited for: an interpreter that ends in the middle of it aborts the process."""

_CPU = torch.device("cpu")


class GlooGroup:
    """The trainer's ranks and all workers that receive its weights. Making it returns when all members have come.

    ``host`` names the interface whose address this member offers to the others. Every operation is bounded by ``timeout_s``
    seconds. Raises RuntimeError if the others do not come in that time, or one gives up. It is a
    ``bridge.transfer.transport.Group``.
    """

    def __init__(self, store: TCPStore, host: str, rank: int, world_size: int, timeout_s: float) -> None:
        self._meeting = Meeting(store, world_size, timeout_s)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # a constructor without them would not take a host
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        with self._meeting.entering():
            self._group: Any = ProcessGroupGloo(store, rank, world_size, options)
        self._pending: dict[tuple[int, int], Any] = {}
        self.cancelled: Callable[[], bool] = lambda: False

    def device(self, peer: int) -> torch.device:
        return _CPU

    def together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # connections are independent of each other

    def send(self, data: Tensor, peer: int, number: int) -> None:
        """Start to send a contiguous CPU tensor to ``peer``; it must not change until :meth:`finish`."""
        self._pending[peer, number] = self.start_send(data, peer, number)

    def receive(self, data: Tensor, peer: int, number: int) -> None:
        """Start to fill a contiguous CPU tensor with the message ``number`` of ``peer``."""
        self._pending[peer, number] = self.start_receive(data, peer, number)

    def finish(self, peer: int, number: int) -> None:
        """Wait for a message. Raises RuntimeError if it takes longer than the time-out, or the peer has left."""
        self._pending.pop((peer, number)).wait()

    def start_send(self, data: Tensor, peer: int, number: int) -> Any:
        """As :meth:`send`, for a caller that keeps the work, which has a ``wait``, itself."""
        return self._group.send([data], peer, number)

    def start_receive(self, data: Tensor, peer: int, number: int) -> Any:
        """As :meth:`receive`, likewise."""
        return self._group.recv([data], peer, number)

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
        self._meeting.leave()
        keep, self._group, self._pending = [*self._pending.values(), self._group], None, {}
        closing = threading.Thread(target=keep.clear, name="close-transfer-group", daemon=True)
        closing.start()
        closing.join(CLOSE_GRACE_S)
