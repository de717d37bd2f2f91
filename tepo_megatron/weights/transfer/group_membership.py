"""The members of a weight-transfer group say who they are before the group forms, and each looks whether all can join.

NCCL answers with an error code in one process, and with silence in the others, where its versions differ or where two members
are on one GPU. Here every member reads the same introductions and raises the same sentence, before NCCL is called.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from tepo_megatron.weights.transfer.transport import is_loopback

_APART = "set rollout.server.placement = colocated, or rollout.server.transport = auto or gloo"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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
        return Introduction(name, host_name(), address)
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return Introduction(name, host_name(), address, gpu, ".".join(map(str, torch.cuda.nccl.version())))


def host_name() -> str:
    """Returns a unique name of this machine, the same in all its containers. It changes with every start of the machine."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()


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
