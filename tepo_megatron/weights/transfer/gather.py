"""Gathers full tensors on one rank, one at a time: the plain way, which the shard-to-shard bridge is measured against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.weights.families import kept_in_fp32
from tepo_megatron.weights.geometry import Shard, ShardLayout


def gather_sources(layouts: Sequence[ShardLayout]) -> dict[str, list[tuple[int, Shard]]]:
    """Returns for each tensor the (rank, shard) pairs that cover it once; the lowest rank sends what several hold.

    Nothing is communicated: every rank computes the same from the layouts of all. Raises ValueError for a tensor that the ranks
    do not cover.
    """
    plan: dict[str, list[tuple[int, Shard]]] = {name: [] for name in layouts[0].shapes}
    taken = set()
    for rank, layout in enumerate(layouts):
        for shard in layout.shards:
            if (shard.tensor, shard.box) not in taken:
                taken.add((shard.tensor, shard.box))
                plan[shard.tensor].append((rank, shard))
    for name, shape in layouts[0].shapes.items():
        covered = sum(_numel(shard.box.shape) for _, shard in plan[name])
        if covered != _numel(shape):
            raise ValueError(f"the ranks together hold {covered} of {_numel(shape)} elements of {name} {tuple(shape)}")
    return plan


def shards_to_write(plan: Mapping[str, list[tuple[int, Shard]]], rank: int) -> list[Shard]:
    """Returns a rank's shards of a plan by :func:`gather_sources`; those of all ranks cover the model once."""
    return [shard for pairs in plan.values() for owner, shard in pairs if owner == rank]


def gather_to_root(
    plan: Mapping[str, list[tuple[int, Shard]]], shapes: Mapping[str, tuple[int, ...]], params: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor | None]]:
    """Yields (name, tensor) in the plan's order: the full tensor on global rank 0, None on the others.

    Every rank of the default group must exhaust the iterator, all in the same order. Rank 0 holds one full tensor at a time.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = next(iter(params.values())).device
    dtype = next(iter(params.values())).dtype
    for name, owners in plan.items():
        own = torch.float32 if kept_in_fp32(name) else dtype
        full = torch.empty(shapes[name], dtype=own, device=device) if rank == 0 else None
        for owner in sorted({owner for owner, _ in owners}):
            shards = [shard for source, shard in owners if source == owner]
            if owner == rank:
                values = [params[shard.param].detach()[shard.at.slices] for shard in shards]
                if full is None:
                    dist.send(torch.cat([part.reshape(-1) for part in values]), dst=0)
                else:
                    for shard, part in zip(shards, values, strict=True):
                        full[shard.box.slices] = part
            elif full is not None:
                _receive(full, shards, owner)
        yield name, full


def _receive(full: Tensor, shards: Sequence[Shard], owner: int) -> None:
    sizes = [_numel(shard.box.shape) for shard in shards]
    flat = torch.empty(sum(sizes), dtype=full.dtype, device=full.device)
    dist.recv(flat, src=owner)
    for shard, part in zip(shards, flat.split(sizes), strict=True):
        full[shard.box.slices] = part.view(shard.box.shape)


def _numel(shape: Sequence[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
