"""Transports, imported when first used.

``rollout.server.transport`` repeats the names, because config imports no weights.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from warnings import warn

from torch.distributed import Store  # type: ignore[attr-defined]

from tepo_megatron.weights.transfer.transport import (
    Introduction,
    Member,
    Rendezvous,
    TransferGroup,
    TransportName,
    TransportSpec,
    check_members,
)

__all__ = ["Member", "find_transport", "join", "transport_names"]


def transport_names() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def find_transport(name: TransportName) -> TransportSpec:
    if name not in transport_names():
        raise ValueError(f"rollout.server.transport = {name} is not known; known: {', '.join(transport_names())}")
    transport: TransportSpec = import_module(f"{__name__}.{name}").TRANSPORT
    return transport


def join(name: TransportName, store: Store, member: Member, timeout_s: float, *, or_gloo: bool = False) -> TransferGroup:
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
        shared = check_members(store, member.world_size, nccl=name == "nccl", may_share=or_gloo)
    if shared:
        warn(f"{shared}: the weights take gloo, through the memory of the hosts", stacklevel=2)
        transport = find_transport("gloo")
    return transport.join(store, member, timeout_s)
