"""The transports from a trainer rank to a worker. Each module of this folder is one, and declares itself as ``TRANSPORT``.

A transport is imported when it is first used, by its name. ``rollout.server.transport`` lists the names again, because
config imports nothing of the bridge; a test compares the two lists (tests/unit/weights/test_transports.py).
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from warnings import warn

from torch.distributed import Store  # type: ignore[attr-defined]

from tepo_megatron.weights.transfer.transport import (
    Group,
    Member,
    Rendezvous,
    TransportName,
    TransportSpec,
    call_roll,
    introduce,
    introduction,
)

__all__ = ["Member", "find_transport", "join", "transport_names"]


def transport_names() -> tuple[str, ...]:
    """Returns the names of all transports, which are the modules of this folder."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def find_transport(name: TransportName) -> TransportSpec:
    """Returns the transport ``name``. Raises ValueError, with the known names, if there is none."""
    if name not in transport_names():
        raise ValueError(f"rollout.server.transport = {name} is not known; known: {', '.join(transport_names())}")
    transport: TransportSpec = import_module(f"{__name__}.{name}").TRANSPORT
    return transport


def join(name: TransportName, store: Store, member: Member, timeout_s: float, *, or_gloo: bool = False) -> Group:
    """Joins the group that meets at ``store``; returns when all members have. With ``or_gloo``, alike on all, it is gloo's
    where two members are on one GPU, which NCCL does not take.

    Raises RuntimeError if they do not in ``timeout_s`` seconds, if one of them leaves, if this member cannot use the transport
    ``name``, and on all of them if they cannot form a group (``bridge.transfer.roll_call``).
    """
    transport = find_transport(name)
    if transport.requires_gpu and member.device.type != "cuda":
        raise RuntimeError(
            f"rank {member.rank} of the weight-transfer group runs on {member.device}, but rollout.server.transport = {name} "
            "needs CUDA on both sides; set it to gloo"
        )
    introduce(store, member.rank, introduction(member.name or f"rank {member.rank}", member.address, member.device))
    # What is wrong with the group is for all to say: also for who is still on its way here when another has said so and left.
    with Rendezvous(store, member.world_size, timeout_s, stage="introduced", parts=True).forming_group():
        shared = call_roll(store, member.world_size, nccl=name == "nccl", may_share=or_gloo)
    if shared:
        warn(f"{shared}: the weights take gloo, through the memory of the hosts", stacklevel=2)
        transport = find_transport("gloo")
    return transport.join(store, member, timeout_s)
