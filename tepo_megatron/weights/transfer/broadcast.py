"""Broadcasts full tensors from rank 0 to all, in buckets that both sides derive from one manifest: the plain way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_megatron.weights.transfer.transports.gloo import GlooGroup

BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 16
"""Every tensor starts at a multiple of this number of bytes in its bucket, which is a multiple of any dtype's item size."""

Manifest = Sequence[tuple[str, Sequence[int], str]]
"""The tensors that will be sent, in order: (name, shape, name of the torch dtype such as ``"float32"``)."""


@dataclass(frozen=True)
class BucketEntry:
    """A tensor of the manifest and its offset in its bucket, in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, bucket: Tensor) -> Tensor:
        """Returns the tensor within a uint8 bucket, without a copy."""
        return bucket[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


def buckets(manifest: Manifest, limit: int = BUCKET_BYTES) -> list[list[BucketEntry]]:
    """Divides a manifest into buckets of at most ``limit`` bytes, one for each message; a larger tensor gets its own.

    Raises ValueError for a dtype that torch does not have, and for a name that occurs twice.
    """
    filled: list[list[BucketEntry]] = []
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
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        size = math.prod(shape) * dtype.itemsize
        if not filled or offset + size > limit:
            filled.append([])
            offset = 0
        filled[-1].append(BucketEntry(name, tuple(shape), dtype, offset))
        end = offset + size
    return filled


def send(
    group: GlooGroup,
    manifest: Manifest,
    tensors: Iterable[Tensor],
    *,
    cancelled: Callable[[], bool] = lambda: False,
    limit: int = BUCKET_BYTES,
) -> None:
    """Broadcasts ``tensors``, which must be those of the manifest in its order, from rank 0; blocks until they are sent.

    ``cancelled`` is asked while a message waits for its receivers. Raises ValueError where a tensor does not match the
    manifest, RuntimeError naming the tensors of the message when the broadcast fails, times out or is cancelled.
    """
    stream = iter(tensors)
    for entries in buckets(manifest, limit):
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


def receive(group: GlooGroup, manifest: Manifest, *, limit: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor on the CPU) as they arrive from rank 0, in the order of the manifest.

    The tensors of one message share memory that nothing else uses. Raises RuntimeError naming the tensors of the message when
    the broadcast fails or times out.
    """
    for entries in buckets(manifest, limit):
        bucket = torch.empty(entries[-1].offset + entries[-1].nbytes, dtype=torch.uint8)
        _broadcast(group, entries, bucket, lambda: False)
        for entry in entries:
            yield entry.name, entry.view(bucket)


def _broadcast(group: GlooGroup, entries: list[BucketEntry], bucket: Tensor, cancelled: Callable[[], bool]) -> None:
    try:
        group.broadcast(bucket, cancelled)
    except RuntimeError as error:
        what = f"tensor {entries[0].name!r}" if len(entries) == 1 else f"tensors {entries[0].name!r} to {entries[-1].name!r}"
        raise RuntimeError(f"the transfer of {what} failed: {error}") from error
