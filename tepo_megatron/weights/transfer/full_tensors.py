"""Gathers full tensors on rank 0 and broadcasts them in buckets, in a manifest's order."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.weights.architecture import is_always_fp32
from tepo_megatron.weights.geometry import Box, Shard, ShardLayout
from tepo_megatron.weights.transfer.transport import TransferError
from tepo_megatron.weights.transfer.transports.gloo import GlooGroup

_BUCKET_BYTES = 64 * 2**20
_ALIGNMENT = 16  # bytes; a multiple of any dtype's item size

TensorManifest = Sequence[tuple[str, Sequence[int], str]]  # (name, shape, torch dtype such as "float32")


@dataclass(frozen=True)
class _BucketEntry:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, bucket: Tensor) -> Tensor:
        return bucket[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


def _buckets(manifest: TensorManifest, limit: int = _BUCKET_BYTES) -> list[list[_BucketEntry]]:
    """Each message has at most ``limit`` bytes, or one tensor."""
    filled: list[list[_BucketEntry]] = []
    end, names = 0, set[str]()
    for name, shape, dtype_name in manifest:
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"tensor {name!r} of the weights manifest has the unknown dtype {dtype_name!r}; use a torch dtype name"
            )
        if name in names:
            raise ValueError(f"tensor {name!r} occurs twice in the weights manifest; every name may be sent once")
        names.add(name)
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        size = math.prod(shape) * dtype.itemsize
        if not filled or offset + size > limit:
            filled.append([])
            offset = 0
        filled[-1].append(_BucketEntry(name, tuple(shape), dtype, offset))
        end = offset + size
    return filled


def send(
    group: GlooGroup,
    manifest: TensorManifest,
    tensors: Iterable[Tensor],
    *,
    cancelled: Callable[[], bool] = lambda: False,
    limit: int = _BUCKET_BYTES,
) -> None:
    """Rank 0 calls; waits poll ``cancelled``.

    Raises ValueError for a wrong tensor, RuntimeError with a failed message's tensors.
    """
    stream = iter(tensors)
    for entries in _buckets(manifest, limit):
        bucket = torch.empty(entries[-1].offset + entries[-1].nbytes, dtype=torch.uint8)
        for entry in entries:
            tensor = next(stream, None)
            if tensor is None:
                raise ValueError(f"the weights end before tensor {entry.name!r}, which the manifest announces")
            if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
                raise ValueError(
                    f"tensor {entry.name!r} is {tensor.dtype} {tuple(tensor.shape)}, but the manifest announces "
                    f"{entry.dtype} {entry.shape}"
                )
            entry.view(bucket).copy_(tensor.detach())
        _broadcast(group, entries, bucket, cancelled)
    if next(stream, None) is not None:
        raise ValueError(f"there are more tensors than the {len(manifest)} that the manifest announces")


def receive(group: GlooGroup, manifest: TensorManifest, *, limit: int = _BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
    """Yields CPU tensors; those of one message share memory.

    Raises RuntimeError with a failed message's tensors.
    """
    for entries in _buckets(manifest, limit):
        bucket = torch.empty(entries[-1].offset + entries[-1].nbytes, dtype=torch.uint8)
        _broadcast(group, entries, bucket, lambda: False)
        for entry in entries:
            yield entry.name, entry.view(bucket)


def _broadcast(group: GlooGroup, entries: list[_BucketEntry], bucket: Tensor, cancelled: Callable[[], bool]) -> None:
    try:
        group.broadcast(bucket, cancelled)
    except RuntimeError as error:
        what = f"tensor {entries[0].name!r}" if len(entries) == 1 else f"tensors {entries[0].name!r} to {entries[-1].name!r}"
        raise TransferError(f"the transfer of {what} failed: {error}") from error


class GatherPlan:
    """Names (rank, shard) pairs that cover each tensor once. Raises ValueError if the ranks together lack an element."""

    def __init__(self, layouts: Sequence[ShardLayout]) -> None:
        self.shapes = layouts[0].shapes
        by_box: dict[str, dict[Box, tuple[int, Shard]]] = {name: {} for name in self.shapes}
        for rank, layout in enumerate(layouts):
            for shard in layout.shards:
                by_box[shard.tensor].setdefault(shard.box, (rank, shard))
        self.owners = {name: list(owners.values()) for name, owners in by_box.items()}
        for name, shape in self.shapes.items():
            covered = sum(shard.box.numel for _, shard in self.owners[name])
            if covered != math.prod(shape):
                raise ValueError(f"the ranks together hold {covered} of {math.prod(shape)} elements of {name} {tuple(shape)}")

    def shards_of(self, rank: int) -> list[Shard]:
        return [shard for pairs in self.owners.values() for owner, shard in pairs if owner == rank]

    def gather_to_root(self, params: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor | None]]:
        """The tensor is None except on global rank 0.

        Every rank of the default group, which has had a collective before, must exhaust it. Rank 0 holds one tensor at a time.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        first = next(iter(params.values()))
        device, dtype = first.device, first.dtype
        for name, owners in self.owners.items():
            tensor_dtype = torch.float32 if is_always_fp32(name) else dtype
            full = torch.empty(self.shapes[name], dtype=tensor_dtype, device=device) if rank == 0 else None
            for owner in sorted({owner for owner, _ in owners}):
                shards = [shard for source, shard in owners if source == owner]
                sizes = [shard.box.numel for shard in shards]
                if owner == rank:
                    parts = [params[shard.param].detach()[shard.param_box.slices] for shard in shards]
                    if full is None:
                        _exchange(dist.isend, torch.cat([part.reshape(-1) for part in parts]), 0)
                elif full is not None:
                    flat = torch.empty(sum(sizes), dtype=tensor_dtype, device=device)
                    _exchange(dist.irecv, flat, owner)
                    parts = [*flat.split(sizes)]
                if full is not None:
                    for shard, part in zip(shards, parts, strict=True):
                        full[shard.box.slices] = part.reshape(shard.box.shape)
            yield name, full


def _exchange(start: Callable[..., Any], flat: Tensor, peer: int) -> None:
    # outside a batch NCCL makes a communicator for each pair of ranks, and keeps it
    for work in dist.batch_isend_irecv([dist.P2POp(start, flat, peer)]):
        work.wait()
