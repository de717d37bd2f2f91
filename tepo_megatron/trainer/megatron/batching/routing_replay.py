"""The sampler's choice of experts on its way from rollouts to every rank: ``Batch.routed_experts_T``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.core.rollout import Rollout, not_recorded
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.expert_routes import rollout_fault

_PIECE_BYTES = 2**28
"""What of a record lies on a GPU at once while it is sent: a step's record has gigabytes, and stays in the host's memory."""


class RouteSizes(NamedTuple):
    """``itemsize`` is 0 where there is no record."""

    itemsize: int
    layers: int
    per_token: int


def pack_routes(rollouts: Sequence[Rollout]) -> Tensor | None:
    """Packs the records of all rollouts: [T, layers, k], with no expert for the last token of each; None where there are none.

    Raises ValueError, naming the rollout, for a record of another form or length than the first one's.
    """
    first = next((rollout.routed_experts for rollout in rollouts if rollout.routed_experts is not None), None)
    if first is None:
        return None
    lengths = [rollout.prompt_ids.size + rollout.response_ids.size for rollout in rollouts]
    packed = np.full((sum(lengths), *first.shape[1:]), not_recorded(first.itemsize), first.dtype)
    offset = 0
    for rollout, length in zip(rollouts, lengths, strict=True):
        found = rollout.routed_experts
        if found is None or found.shape != (length - 1, *first.shape[1:]) or found.dtype != first.dtype:
            has = "none" if found is None else f"{found.dtype} of {found.shape}"
            raise ValueError(
                f"rollout of problem {rollout.problem_id} should have a routing record, {first.dtype} of "
                f"{(length - 1, *first.shape[1:])}, but has {has}; it is of another model or another length"
            )
        packed[offset : offset + length - 1] = found
        offset += length
    return torch.from_numpy(packed)


def check_routes(rollouts: Sequence[Rollout], spec: ModelSpec) -> None:
    """Raises ValueError, naming the rollout, where the experts of a token cannot be replayed."""
    for rollout in rollouts:
        if fault := rollout_fault(rollout, spec):
            raise ValueError(
                f"rollout of problem {rollout.problem_id} {fault}; record the step again with "
                "rollout.server.routing_replay = true, or set it to false"
            )


def sizes_of(routes_T: Tensor | None) -> RouteSizes:
    """Of [T, layers, k]."""
    return RouteSizes(0, 0, 0) if routes_T is None else RouteSizes(routes_T.itemsize, *routes_T.shape[1:])


def broadcast_routes(routes_T: Tensor | None, tokens: int, sizes: RouteSizes, device: torch.device) -> Tensor | None:
    """Sends rank 0's record to every rank's host memory, through ``device``. Every rank calls; only rank 0's first argument is
    read.
    """
    if not sizes.itemsize:
        return None
    if routes_T is None:
        dtype = torch.uint8 if sizes.itemsize == 1 else torch.int16
        routes_T = torch.empty(tokens, sizes.layers, sizes.per_token, dtype=dtype)
    flat = routes_T.contiguous().view(-1).view(torch.uint8)  # NCCL knows no int16
    for piece in flat.split(_PIECE_BYTES):
        sent = piece.to(device)
        dist.broadcast(sent, src=0)
        if sent.data_ptr() != piece.data_ptr():
            piece.copy_(sent)
    return routes_T
