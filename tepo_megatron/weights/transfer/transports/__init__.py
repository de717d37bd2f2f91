"""Transports, imported when first used.

``rollout.server.transport`` repeats the names, because config imports no weights.
"""

from __future__ import annotations

import json
import pkgutil
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import combinations
from warnings import warn

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from tepo_megatron.runtime.proc import boot_id
from tepo_megatron.weights.transfer.transport import Member, Rendezvous, TransferGroup, TransportSpec, is_loopback

__all__ = ["Member", "find_transport", "join", "transport_names"]


def transport_names() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def find_transport(name: str) -> TransportSpec:
    if name not in transport_names():
        raise ValueError(f"rollout.server.transport = {name} is not known; known: {', '.join(transport_names())}")
    return import_module(f"{__name__}.{name}").TRANSPORT


@dataclass(frozen=True)
class Introduction:
    name: str
    host: str
    address: str
    gpu: str = ""
    nccl: str = ""

    @classmethod
    def of(cls, member: Member) -> Introduction:
        name = member.name or f"rank {member.rank}"
        if member.device.type != "cuda":
            return cls(name, boot_id(), member.address)
        gpu = str(torch.cuda.get_device_properties(member.device).uuid)
        return cls(name, boot_id(), member.address, gpu, ".".join(map(str, torch.cuda.nccl.version())))

    def announce(self, store: Store, rank: int) -> None:
        """Call it before the member counts as present."""
        store.set(f"introduction/{rank}", json.dumps(asdict(self)))

    @classmethod
    def check_all(cls, store: Store, world_size: int, *, nccl: bool, may_share: bool = False) -> str:
        """Raises the same RuntimeError on all members, before NCCL fails in one and hangs others.

        ``may_share``: returns two members that share a GPU, or "".
        """
        texts = store.multi_get([f"introduction/{rank}" for rank in range(world_size)])
        present = [cls(**json.loads(text)) for text in texts]
        for member in present:
            other = next((other for other in present if other.host != member.host), None)
            if other is not None and is_loopback(member.address):
                raise RuntimeError(
                    f"{member.place} offers a loopback address to the weight-transfer group, in which {other.place} is on "
                    "another machine; set rollout.server.interface to an address by which the machines reach each other"
                )
        if not nccl:
            return ""
        pairs = [(one, other) for one, other in combinations(present, 2) if (one.host, one.gpu) == (other.host, other.gpu)]
        shared = "".join(f"{one.place} and {other.place} are on the same GPU, {one.gpu}" for one, other in pairs[:1])
        if shared and may_share:
            return shared
        for other in present:
            first = present[0]
            if other.nccl != first.nccl:
                raise RuntimeError(
                    f"{first.place} has NCCL {first.nccl}, {other.place} has NCCL {other.nccl}: NCCL joins equal versions "
                    "only; run trainer and servers from images of one docker/pins.txt, or set rollout.server.transport = gloo"
                )
        if shared:
            raise RuntimeError(
                f"{shared}, and NCCL takes each GPU once; set rollout.server.placement = colocated, or "
                "rollout.server.transport = auto or gloo"
            )
        return ""

    @property
    def place(self) -> str:
        return f"{self.name} ({self.address})"


def join(name: str, store: Store, member: Member, timeout_s: float, *, or_gloo: bool = False) -> TransferGroup:
    """``or_gloo``, equal on all members: gloo replaces NCCL if two share a GPU.

    Raises RuntimeError if a member is late, leaves or lacks the transport.
    """
    transport = find_transport(name)
    if transport.requires_gpu and member.device.type != "cuda":
        raise RuntimeError(
            f"rank {member.rank} of the weight-transfer group runs on {member.device}, but rollout.server.transport = {name} "
            "needs CUDA on both sides; set it to gloo"
        )
    Introduction.of(member).announce(store, member.rank)
    # Every member reports a fault of the group, also one that arrives after another has reported it and left.
    with Rendezvous(store, member.world_size, timeout_s, stage="introduced", parts=True).forming_group():
        shared = Introduction.check_all(store, member.world_size, nccl=name == "nccl", may_share=or_gloo)
    if shared:
        warn(f"{shared}: the weights take gloo, through the memory of the hosts", stacklevel=2)
        transport = find_transport("gloo")
    return transport.join(store, member, timeout_s)
