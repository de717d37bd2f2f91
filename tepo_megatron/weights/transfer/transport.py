"""Interface of transports, and the rendezvous of trainer ranks and workers."""

import ipaddress
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from tepo_megatron.runtime.rendezvous import private_folder

BACKEND = "tepo_gloo"  # vLLM's name of the receiving engine

_MEMBERS_POLL_INTERVAL_S = 0.02

_JOINED, _LEFT = "joined", "left"


class TransferError(RuntimeError):
    """A message failed, perhaps because of the peer or the link: other errors of a send are the rank's own."""


class TransferGroup(Protocol):
    """Point-to-point messages, identified by both ranks and a number, with equal sizes at both ends.

    Messages of one ``round`` travel together. Two ranks start theirs in the same order, round by round.
    """

    cancelled: Callable[[], bool] = staticmethod(lambda: False)
    """Endless waits poll it; if true, the message fails."""

    rounds: int = 0
    """A sender joins at least so many rounds before the digests', also without messages."""

    def device(self, peer: int) -> torch.device:
        """Tensors from and to ``peer`` must be here."""

    def round(self) -> AbstractContextManager[None]:
        """Messages start only inside, at least one per block."""
        return nullcontext()

    def send(self, data: Tensor, peer: int, number: int) -> None:
        """``data`` is contiguous, and must not change until ``wait``."""

    def receive(self, data: Tensor, peer: int, number: int) -> None: ...

    def wait(self, peer: int, number: int) -> None:
        """Raises RuntimeError if the message fails or times out."""

    def finish(self) -> None:
        """Ends a trainer rank's update, when relayed messages have arrived."""
        return  # nothing to do without them

    def close(self) -> None:
        """Pending waits of the other members fail."""


@dataclass(frozen=True)
class RelayRoutes:
    """Messages through the trainer rank on the receiver's GPU.

    ``via``: worker on another GPU → the rank on its GPU. ``forwards``: (source, worker) → bytes of each message that this rank
    relays, digests last. ``rounds``: the largest of all ranks.
    """

    via: Mapping[int, int] = field(default_factory=dict)
    forwards: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    sources: int = 0
    rounds: int = 0


@dataclass(frozen=True)
class Member:
    """``same_gpu_receivers``: rank on the same GPU → bytes of its largest message. ``writers``: source → the rank on the same
    GPU that brings its messages.
    """

    rank: int
    world_size: int
    device: torch.device
    address: str
    name: str = ""
    same_gpu_receivers: Mapping[int, int] = field(default_factory=dict)
    writers: Mapping[int, int] = field(default_factory=dict)
    routes: RelayRoutes = field(default_factory=RelayRoutes)


@dataclass(frozen=True)
class TransportSpec:
    """``join(store, member, timeout_s)`` returns when every member has called it.

    ``staging_bytes``: of a rank, for messages under way. ``fills``: messages are full; a copy costs less than a message.
    """

    join: Callable[[Store, Member, float], TransferGroup]
    requires_gpu: bool = False
    staging_bytes: int = 64 * 2**20
    fills: bool = False


def listen(host: str) -> tuple[Store, str]:
    """The place for ``connect`` is a file at a loopback address, otherwise a port of ``host`` only."""
    if is_loopback(host):
        # The file stays: a process that still asks whether a member has left would wait for a missing file.
        place = str(private_folder() / f"transfer-{uuid.uuid4()}")
        return FileStore(place), place
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        port = server.getsockname()[1]
        # The store takes the socket over: another process could take a port that is closed and opened again.
        store = TCPStore(host, port, None, True, timedelta(seconds=60), False, master_listen_fd=server.detach())
    return store, str(port)


def connect(host: str, place: str, timeout_s: float) -> Store:
    if place.isdecimal():
        return TCPStore(host, int(place), None, False, timedelta(seconds=timeout_s), False)
    if not Path(place).exists():  # opening the store would create the file and wait in vain
        raise RuntimeError(f"the weight-transfer group meets in {place}, which is not there (any more)")
    store: Store = FileStore(place)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def local_address(host: str) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing, to any port
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


class Rendezvous:
    """Joining gloo or NCCL cannot be interrupted: it starts only when all are present.

    ``stage`` separates meetings at one store. ``parts``: one may leave after all have come.
    """

    def __init__(self, store: Store, world_size: int, timeout_s: float, stage: str = _JOINED, *, parts: bool = False) -> None:
        self.store = store
        self._world_size, self._timeout_s, self._stage, self._parts = world_size, timeout_s, stage, parts

    @staticmethod
    def lacks_its_file(store: Store) -> bool:
        # Rank 0 is gone, and its folder with it: the store would wait for the file.
        return isinstance(store, FileStore) and not Path(store.path).exists()  # type: ignore[attr-defined]

    @staticmethod
    def announce_departure(store: Store) -> None:
        if Rendezvous.lacks_its_file(store):
            return
        with suppress(RuntimeError):  # rank 0 is gone, and the store with it: the others know
            store.set(_LEFT, "1")

    @contextmanager
    def forming_group(self) -> Iterator[None]:
        """A failure in the block fails all members."""
        try:
            self._wait_for_members()
            yield
        except BaseException:
            self.announce_departure(self.store)
            raise

    def _wait_for_members(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        # The store has no barrier that a member could leave early; so each member adds itself to a counter, and polls.
        present = self.store.add(self._stage, 1)
        while present < self._world_size:
            if self.member_left():
                if self._parts and self._members_present() == self._world_size:
                    return
                raise RuntimeError("a member of the weight-transfer group left before all had joined")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{present} of {self._world_size} members of the weight-transfer group joined within {self._timeout_s:g} s "
                    "(rollout.server.transfer_timeout_s)"
                )
            time.sleep(_MEMBERS_POLL_INTERVAL_S)
            present = self._members_present()

    def member_left(self) -> bool:
        """Also true if rank 0, the store's keeper, is gone."""
        try:
            return bool(self.store.check([_LEFT]))
        except RuntimeError:
            return True

    def _members_present(self) -> int:
        try:
            return int(self.store.add(self._stage, 0))
        except RuntimeError:
            raise RuntimeError("the trainer's rank 0 left before all members of the weight-transfer group had joined") from None
