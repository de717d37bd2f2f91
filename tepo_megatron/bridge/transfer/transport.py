"""What a way of sending weights must offer, and where the members of one group meet: the trainer's ranks, then the workers.

Both sides import this module, so it knows neither Megatron nor vLLM. The ways themselves are in ``bridge.transfer.transports``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

BACKEND = "tepo_gloo"
"""The name under which the plugin registers the receiving engine with vLLM, whichever transport it then uses."""

Kind = Literal["gloo", "nccl", "ipc"]
"""Over sockets through the memory of the hosts; from GPU to GPU; within a GPU that both sides share, and gloo beside it."""

ROLL_CALL_POLL_S = 0.02

_HERE, _LEFT = "here", "left"


class Transport(Protocol):
    """Point-to-point messages. A message is known by the other rank and its number; both ends must give the same size.

    What a rank starts within one :meth:`together` is a round. Between two ranks, messages are started in the same order on
    both sides, round by round.
    """

    def device(self, peer: int) -> torch.device:
        """Where the tensors of messages from and to ``peer`` must lie."""

    def together(self) -> AbstractContextManager[None]:
        """The messages started within travel at once; none may be started outside, and at least one must be."""

    def send(self, data: Tensor, peer: int, number: int) -> None:
        """Starts to send a contiguous tensor, which must not change until :meth:`finish`."""

    def receive(self, data: Tensor, peer: int, number: int) -> None:
        """Starts to fill a contiguous tensor."""

    def finish(self, peer: int, number: int) -> None:
        """Waits for a message. Raises RuntimeError if it fails or takes longer than the transport's time-out."""


class Group(Transport, Protocol):
    """A transport between the members of one group."""

    cancelled: Callable[[], bool]
    """Asked while a message is waited for, where a wait could not end otherwise: true lets it fail."""

    def close(self) -> None:
        """Leaves; what the others wait for fails."""


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


def give_up(store: TCPStore) -> None:
    """Tells all members of the group that meets at ``store``, also those that are still coming, that one is gone."""
    with suppress(RuntimeError):  # the store has gone with rank 0, so they know
        store.set(_LEFT, "1")


class Meeting:
    """Whether all members of a group have come, and whether one has left: told through the group's own store.

    Entering a group of gloo or NCCL cannot be interrupted, so it begins when all members are known to be there. A member that
    fails before or afterwards says so here, and nobody waits for it until the time-out.
    """

    def __init__(self, store: TCPStore, world_size: int, timeout_s: float) -> None:
        self.store = store
        self._world_size, self._timeout_s = world_size, timeout_s

    @contextmanager
    def entering(self) -> Iterator[None]:
        """Runs the block, which enters the group, when all members have come; what fails here fails for all of them.

        Raises RuntimeError when a member has left, or does not come in time.
        """
        try:
            self._call_roll()
            yield
        except BaseException:
            self.leave()
            raise

    def _call_roll(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        present = self.store.add(_HERE, 1)
        while present < self._world_size:
            if self.broken():
                raise RuntimeError("a member of the weight-transfer group gave up before all had come")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{present} of {self._world_size} members of the weight-transfer group came within {self._timeout_s:g} s "
                    "(rollout.server.transfer_timeout_s)"
                )
            time.sleep(ROLL_CALL_POLL_S)
            present = self._present()

    def broken(self) -> bool:
        """Whether a member has left, or rank 0, which keeps the store, is gone."""
        try:
            return bool(self.store.check([_LEFT]))
        except RuntimeError:
            return True

    def leave(self) -> None:
        """Tells the others that this member is gone."""
        give_up(self.store)

    def _present(self) -> int:
        try:
            return int(self.store.add(_HERE, 0))
        except RuntimeError:
            raise RuntimeError(
                "the trainer's rank 0 gave up before all members of the weight-transfer group had come"
            ) from None
