"""The ways from a trainer rank to a worker: gloo, NCCL, CUDA IPC; one call that joins a group of any of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tepo_megatron.bridge.transfer.transport import Group, Kind
from tepo_megatron.bridge.transfer.transports.gloo import GlooGroup
from tepo_megatron.bridge.transfer.transports.ipc import join_ipc
from tepo_megatron.bridge.transfer.transports.nccl import join_nccl


@dataclass(frozen=True)
class Member:
    """One member of a group: its rank in it, the device that its parameters are on, the address that it offers to the others.

    ``gives``: ranks on the same GPU to which it sends, each with the bytes of the largest message. ``takes``: ranks on the
    same GPU from which it receives.
    """

    rank: int
    world_size: int
    device: torch.device
    address: str
    gives: Mapping[int, int] = field(default_factory=dict)
    takes: tuple[int, ...] = ()


def join(kind: Kind, store: TCPStore, member: Member, timeout_s: float) -> Group:
    """Enters the group that meets at ``store``; returns when all members have.

    Raises RuntimeError if they do not come in ``timeout_s`` seconds, one of them gives up, or this member cannot use ``kind``.
    """
    if kind != "gloo" and member.device.type != "cuda":
        raise RuntimeError(
            f"rank {member.rank} of the weight-transfer group runs on {member.device}, but rollout.server.transport = {kind} "
            "needs CUDA on both sides; set it to gloo"
        )
    if kind == "nccl":
        return join_nccl(store, member.rank, member.world_size, member.device, timeout_s)

    def enter() -> GlooGroup:
        return GlooGroup(store, member.address, member.rank, member.world_size, timeout_s)

    if kind == "gloo":
        return enter()
    return join_ipc(enter, store, member.rank, member.device, gives=member.gives, takes=member.takes)
