"""The interface of a transport of weights, and the rendezvous of the members of one group: trainer ranks, then workers.

Both sides import this module, so it imports neither Megatron nor vLLM. The transports are in ``bridge.transfer.transports``.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from tepo_megatron.runtime.proc import boot_id
from tepo_megatron.runtime.rendezvous import private_folder

BACKEND = "tepo_gloo"
"""The name under which the plugin registers the receiving engine with vLLM, whichever transport it then uses."""

TransportName = str
"""The name of a transport is the name of its module in ``bridge.transfer.transports``."""

MEMBERS_POLL_S = 0.02

_JOINED, _LEFT = "joined", "left"


_APART = "set rollout.server.placement = colocated, or rollout.server.transport = auto or gloo"


class Transport(Protocol):
    """Point-to-point messages. The two ranks and a number identify a message; both ends must give the same size.

    The messages that a rank starts within one :meth:`round` travel at once. Two ranks start the messages between them in the
    same order, round by round.
    """

    def device(self, peer: int) -> torch.device:
        """Returns the device on which the tensors of messages from and to ``peer`` must be."""

    def round(self) -> AbstractContextManager[None]:
        """Starts the messages of its block at once. No message may be started outside, and at least one must be inside."""

    def send(self, data: Tensor, peer: int, number: int) -> None:
        """Starts to send a contiguous tensor, which must not change until :meth:`wait`."""

    def receive(self, data: Tensor, peer: int, number: int) -> None:
        """Starts to receive into a contiguous tensor."""

    def wait(self, peer: int, number: int) -> None:
        """Waits for a message. Raises RuntimeError if it fails or takes longer than the transport's time-out."""


class Group(Transport, Protocol):
    """A transport between the members of one group."""

    cancelled: Callable[[], bool]
    """Asked while a message is waited for, where the wait could not end otherwise; if it returns true, the message fails."""

    def finish(self) -> None:
        """Ends an update at a trainer rank: returns when what it passes on for others has been taken. RuntimeError as wait."""

    def close(self) -> None:
        """Leaves the group; what the other members wait for fails."""


@dataclass(frozen=True)
class Routes:
    """Which messages go through the trainer rank on the receiver's GPU (``bridge.transfer.relay``); by default none.

    ``via``: at a trainer rank, each worker on another GPU to which it sends → the rank on that GPU; at a worker, each rank from
    which it receives → the one on its own GPU. The rest is for trainer ranks: ``forwards`` maps (source, worker) to the bytes
    of each message that this rank passes on, the digests last; ``sources`` is the number of trainer ranks; ``own_rounds`` is
    that of the rounds in which this rank sends, ``rounds`` that of the rank with the most.
    """

    via: Mapping[int, int] = field(default_factory=dict)
    forwards: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    sources: int = 0
    own_rounds: int = 0
    rounds: int = 0


@dataclass(frozen=True)
class Member:
    """One member of a group: its rank, the device of its parameters, the address that it offers to the other members.

    ``name`` says to a person who it is, as "trainer rank 0". ``same_gpu_receivers`` maps each rank on the same GPU to which
    this member sends to the bytes of the largest message. ``same_gpu_senders`` are the ranks on the same GPU from which it
    receives. ``routes``: what goes through another rank.
    """

    rank: int
    world_size: int
    device: torch.device
    address: str
    name: str = ""
    same_gpu_receivers: Mapping[int, int] = field(default_factory=dict)
    same_gpu_senders: tuple[int, ...] = ()
    routes: Routes = field(default_factory=Routes)


@dataclass(frozen=True)
class TransportSpec:
    """What a transport's module declares as ``TRANSPORT``.

    ``join(store, member, timeout_s)`` enters the group that meets at ``store``; every member calls it, and it returns when all
    have joined. It raises RuntimeError if one leaves or does not join in time. ``requires_gpu`` means that the parameters of
    all members must be on GPUs.
    """

    join: Callable[[Store, Member, float], Group]
    requires_gpu: bool = False


def listen(host: str) -> tuple[Store, str]:
    """Opens the store at which a group meets; returns it and its place, for :func:`connect`.

    At a loopback address all members are on this machine and of this user: the place is a file in a private folder, and no port
    is open. Elsewhere it is a free port of the address ``host`` only.
    """
    if is_loopback(host):
        # It is left where it is: who still asks whether a member has left would wait for a file that is gone.
        place = str(private_folder() / f"transfer-{uuid.uuid4()}")
        return FileStore(place), place
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        port = server.getsockname()[1]
        # The store takes the socket over: a port that was closed and opened again could go to another process in between.
        store = TCPStore(host, port, None, True, timedelta(seconds=60), False, master_listen_fd=server.detach())
    return store, str(port)


def connect(host: str, place: str, timeout_s: float) -> Store:
    """Connects to the store that the trainer opened with :func:`listen`.

    Raises RuntimeError where the place is a file that this process cannot open.
    """
    if place.isdecimal():
        return TCPStore(host, int(place), None, False, timedelta(seconds=timeout_s), False)
    if not Path(place).exists():  # opening the store would make the file, in which nobody ever comes
        raise RuntimeError(f"the weight-transfer group meets in {place}, which is not there (any more)")
    store: Store = FileStore(place)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def own_address(host: str) -> str:
    """Returns the address of this machine from which it reaches ``host``, and at which ``host`` reaches it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing, to any port
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Whether an address, or a name, is this machine's own and no other's."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def announce_departure(store: Store) -> None:
    """Tells all members of the group that meets at ``store``, also those that are still joining, that one has left."""
    with suppress(RuntimeError):  # the store has gone with rank 0, so they know
        store.set(_LEFT, "1")


class Rendezvous:
    """Knows through the group's own store whether all members of a group have joined, and whether one has left.

    Joining a group of gloo or NCCL cannot be interrupted: it blocks until the last member is there. So it begins only when all
    members are known to be there. A member that fails before or afterwards says so in the store, and nobody waits for it until
    the time-out. ``stage`` names what they come for, where one store is met at more than once; ``parts``: once all have come
    each needs nothing more of the others there, and one that has left meanwhile ends it for nobody.
    """

    def __init__(self, store: Store, world_size: int, timeout_s: float, stage: str = _JOINED, *, parts: bool = False) -> None:
        self.store = store
        self._world_size, self._timeout_s, self._stage, self._parts = world_size, timeout_s, stage, parts

    @contextmanager
    def forming_group(self) -> Iterator[None]:
        """Runs the block, which forms the group, when all members are there; if the block fails, it fails for all of them.

        Raises RuntimeError when a member has left, or does not arrive in time.
        """
        try:
            self._wait_for_members()
            yield
        except BaseException:
            self.announce_departure()
            raise

    def _wait_for_members(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        # The store has no barrier that could be left early. Its counter is one: each member adds itself once, and polls.
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
            time.sleep(MEMBERS_POLL_S)
            present = self._members_present()

    def member_left(self) -> bool:
        """Returns whether a member has left, or rank 0, which keeps the store, is gone."""
        try:
            return bool(self.store.check([_LEFT]))
        except RuntimeError:
            return True

    def announce_departure(self) -> None:
        """Tells the other members that this one has left."""
        announce_departure(self.store)

    def _members_present(self) -> int:
        try:
            return int(self.store.add(self._stage, 0))
        except RuntimeError:
            raise RuntimeError("the trainer's rank 0 left before all members of the weight-transfer group had joined") from None


@dataclass(frozen=True)
class Introduction:
    """What a member says of itself. ``gpu`` is the GPU's UUID, ``nccl`` NCCL's version; both are empty without a GPU."""

    name: str
    host: str
    address: str
    gpu: str = ""
    nccl: str = ""

    @property
    def place(self) -> str:
        return f"{self.name} ({self.address})"


def introduction(name: str, address: str, device: torch.device) -> Introduction:
    """Returns this process's introduction. ``address``: the one that it offers to the other members."""
    if device.type != "cuda":
        return Introduction(name, boot_id(), address)
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return Introduction(name, boot_id(), address, gpu, ".".join(map(str, torch.cuda.nccl.version())))


def introduce(store: Store, rank: int, own: Introduction) -> None:
    """Puts an introduction where the other members find it. Called before the member counts as there."""
    store.set(_key(rank), json.dumps(asdict(own)))


def call_roll(store: Store, world_size: int, *, nccl: bool, may_share: bool = False) -> str:
    """Reads all introductions, when all members are there. Raises RuntimeError where they cannot form a group, alike on all.

    ``nccl``: the group is to be NCCL's. ``may_share``: it need not be, where two members are on one GPU; returns which two are
    then, and an empty string otherwise.
    """
    present = [Introduction(**json.loads(store.get(_key(rank)))) for rank in range(world_size)]
    shared = shared_gpu(present) if nccl else ""
    problem = unreachable(present)
    if nccl and not (shared and may_share):
        problem = problem or different_nccl(present) or (shared and f"{shared}, and NCCL takes each GPU once; {_APART}")
    if problem:
        raise RuntimeError(problem)
    return shared


def unreachable(members: Sequence[Introduction]) -> str:
    """Returns which member offers an address that members on other machines cannot reach; empty if none does."""
    if len({member.host for member in members}) == 1:
        return ""
    for member in members:
        if is_loopback(member.address):
            other = next(each for each in members if each.host != member.host)
            return (
                f"{member.place} offers a loopback address to the weight-transfer group, in which {other.place} is on another "
                "machine; set rollout.server.interface to an address by which the machines reach each other"
            )
    return ""


def different_nccl(members: Sequence[Introduction]) -> str:
    """Returns which two members have different NCCLs, which NCCL refuses to join; empty if all have the same."""
    first = members[0]
    for member in members:
        if member.nccl != first.nccl:
            return (
                f"{first.place} has NCCL {first.nccl}, {member.place} has NCCL {member.nccl}: NCCL joins equal versions only; "
                "run trainer and servers from images of one docker/pins.txt, or set rollout.server.transport = gloo"
            )
    return ""


def shared_gpu(members: Sequence[Introduction]) -> str:
    """Returns which two members share a GPU, which NCCL refuses ("Duplicate GPU detected"); empty if each has its own."""
    seen: dict[tuple[str, str], Introduction] = {}
    for member in members:
        other = seen.setdefault((member.host, member.gpu), member)
        if other is not member:
            return f"{other.place} and {member.place} are on the same GPU, {member.gpu}"
    return ""


def _key(rank: int) -> str:
    return f"introduction/{rank}"
