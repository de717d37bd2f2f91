"""Writes safetensors files: planned to the byte, so that a finished file is recognised, or streamed with digests."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from tepo_megatron.weights.geometry import Box
from tepo_megatron.weights.storage.manifest import FileRecord
from tepo_megatron.weights.storage.stored import DTYPES, SHARDS, StoredWeights

BUCKET_BYTES = 32 * 2**20
"""Bytes of a tensor in memory at a time."""


FILE_BYTES = 4 * 2**30

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class FileEntry:
    """``dtype`` is safetensors' name."""

    key: str
    tensor: str
    box: Box
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.box.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class PlannedFile:
    name: str
    entries: tuple[FileEntry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def header(self) -> bytes:
        table: dict[str, object] = {"__metadata__": {"format": "pt", **self.metadata}}
        end = 0  # offsets count from the end of the header, so that they do not depend on its length
        for entry in self.entries:
            begin, end = end, end + entry.nbytes
            table[entry.key] = {"dtype": entry.dtype, "shape": list(entry.box.shape), "data_offsets": [begin, end]}
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the format pads with spaces, so that the tensors' bytes are aligned to 8
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(entry.nbytes for entry in self.entries)

    def is_written(self, folder: Path) -> bool:
        """Compares size and header. Only complete files have their name."""
        path = folder / self.name
        if not path.is_file() or path.stat().st_size != self.nbytes:
            return False
        with path.open("rb") as file:
            return file.read(len(self.header)) == self.header

    def write(
        self, folder: Path, source: StoredWeights, advance: Callable[[int], None], *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Streams at most ``bucket_bytes`` (or one row) at a time; calls ``advance`` with the bytes of each write."""
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".unfinished")
        with unfinished.open("wb") as file:
            file.write(self.header)
            for entry in self.entries:
                dtype = DTYPES[entry.dtype]
                for box in _buckets(entry.box, dtype.itemsize, bucket_bytes):
                    bucket = torch.empty(box.shape, dtype=dtype)
                    source.read(entry.tensor, box, bucket)
                    file.write(bucket.view(torch.uint8).numpy().data)
                    advance(bucket.nbytes)
            file.flush()
            os.fsync(file.fileno())  # before the rename: a power cut must not leave the final name without the bytes
        unfinished.replace(path)


def _buckets(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    row = math.prod(box.shape[1:]) * itemsize
    rows = max(1, limit // row)
    for start in range(box.start[0], box.stop[0], rows):
        stop = min(start + rows, box.stop[0])
        yield Box((start, *box.start[1:]), (stop, *box.stop[1:]))


def group_entries(entries: Sequence[FileEntry], limit: int) -> list[tuple[FileEntry, ...]]:
    """Each group has at most ``limit`` bytes, or one entry."""
    groups: list[list[FileEntry]] = []
    group_bytes = 0
    for entry in entries:
        if not groups or group_bytes + entry.nbytes > limit:
            groups.append([])
            group_bytes = 0
        groups[-1].append(entry)
        group_bytes += entry.nbytes
    return [tuple(group) for group in groups]


@dataclass
class WrittenBoxes:
    """``files`` has paths below the checkpoint, some missing after the first ``error``; ``bytes`` counts all boxes."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    bytes: int = 0
    error: str | None = None


def write_boxes(
    folder: Path,
    stem: str,
    boxes: Iterable[tuple[str, Tensor]],
    *,
    metadata: Mapping[str, str],
    file_bytes: int = FILE_BYTES,
) -> WrittenBoxes:
    """Writes ``folder/shards/STEM-00001.safetensors`` and so on, durably, holding at most ``file_bytes`` or one box.

    After a failed write the remaining boxes are still counted, for an error with the space needed.
    """
    written = WrittenBoxes()
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        if pending and written.error is None:
            name = f"{SHARDS}/{stem}-{len(written.files) + 1:05d}.safetensors"
            try:
                written.files[name] = _write_file(folder, name, pending, metadata)
            except OSError as error:
                written.error = f"{folder / name}: {describe_os_error(error)}"
        pending.clear()

    for key, tensor in boxes:
        if sum(pending_tensor.nbytes for pending_tensor in pending.values()) + tensor.nbytes > file_bytes:
            flush()
        pending[key] = tensor.detach().cpu().contiguous()
        written.bytes += tensor.nbytes
    flush()
    return written


def describe_os_error(error: OSError) -> str:
    return f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'unknown')})"


def _write_file(folder: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    # Not by safetensors' writer: the digest is of memory, so that it reveals a wrong write, and a full disk is an OSError.
    entries = tuple(FileEntry(key, key, _whole(tensor), _NAMES[tensor.dtype]) for key, tensor in tensors.items())
    header = PlannedFile(name, entries, metadata).header
    digest = hashlib.sha256(header)
    with (folder / name).open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(header))
        for tensor in tensors.values():
            data = tensor.view(-1).view(torch.uint8).numpy().data
            digest.update(data)
            _write_all(file.fileno(), data)
        os.fsync(file.fileno())
        return FileRecord(os.fstat(file.fileno()).st_size, digest.hexdigest())


def _write_all(handle: int, data: memoryview) -> None:
    """``os.write`` may write less than requested, at most 2 GiB at once."""
    while data:
        data = data[os.write(handle, data) :]


def _whole(tensor: Tensor) -> Box:
    return Box((0,) * tensor.ndim, tuple(tensor.shape))
