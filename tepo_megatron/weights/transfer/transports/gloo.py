import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from tepo_megatron.weights.transfer.transport import Rendezvous, TransferGroup, TransportSpec

_POLL_INTERVAL_S = 1e-4

_CLOSE_GRACE_S = 2.0
"""An interpreter that exits while a group is closing aborts."""


class GlooGroup(TransferGroup):
    """The constructor returns when all have joined, or raises RuntimeError. ``host`` selects the interface."""

    def __init__(self, store: Store, host: str, rank: int, world_size: int, timeout_s: float) -> None:
        self._rendezvous = Rendezvous(store, world_size, timeout_s)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # a constructor without them would not take a host
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        with self._rendezvous.forming_group():
            self._group: Any = ProcessGroupGloo(store, rank, world_size, options)
        self._pending: dict[tuple[int, int], Any] = {}

    def device(self, peer: int) -> torch.device:
        return torch.device("cpu")

    def send(self, data: Tensor, peer: int, number: int) -> None:
        self._pending[peer, number] = self.start_send(data, peer, number)

    def receive(self, data: Tensor, peer: int, number: int) -> None:
        self._pending[peer, number] = self.start_receive(data, peer, number)

    def wait(self, peer: int, number: int) -> None:
        self._pending.pop((peer, number)).wait()

    def start_send(self, data: Tensor, peer: int, number: int) -> Any:
        return self._group.send([data], peer, number)

    def start_receive(self, data: Tensor, peer: int, number: int) -> Any:
        return self._group.recv([data], peer, number)

    def broadcast(self, tensor: Tensor, cancelled: Callable[[], bool]) -> None:
        work = self._group.broadcast(tensor, 0)
        while not work.is_completed():  # a wait() could not be interrupted: gloo cannot abort
            if cancelled():
                raise RuntimeError("a receiver failed")
            time.sleep(_POLL_INTERVAL_S)
        work.wait()

    def close(self) -> None:
        """Uses a thread: destroying a gloo group waits for pending operations, up to their time-out."""
        Rendezvous.announce_departure(self._rendezvous.store)
        # The thread holds the last references. Pending operations come before the group: each holds the connections open.
        keep, self._group, self._pending = [*self._pending.values(), self._group], None, {}
        closing = threading.Thread(target=keep.clear, name="close-transfer-group", daemon=True)
        closing.start()
        closing.join(_CLOSE_GRACE_S)


TRANSPORT = TransportSpec(
    join=lambda store, member, timeout_s: GlooGroup(store, member.address, member.rank, member.world_size, timeout_s)
)
