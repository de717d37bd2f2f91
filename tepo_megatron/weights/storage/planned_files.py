"""Plans safetensors files to the byte before they are written, so that a finished file can be recognised later."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from tepo_megatron.weights.geometry import Box
from tepo_megatron.weights.storage.stored import DTYPES, StoredWeights

BUCKET_BYTES = 32 * 2**20
"""Bytes of a tensor that are held in memory at a time."""


@dataclass(frozen=True)
class FileEntry:
    """``box`` of ``tensor``, which is written under ``key`` in ``dtype`` (safetensors' name of it)."""

    key: str
    tensor: str
    box: Box
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.box.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class PlannedFile:
    """One safetensors file; ``name`` is its path below the folder, ``metadata`` what its header says beside the tensors."""

    name: str
    entries: tuple[FileEntry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def header(self) -> bytes:
        """Returns the bytes before the tensors: the length of a JSON table, and the table of types, shapes and offsets."""
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
        """Returns the size of the file in bytes."""
        return len(self.header) + sum(entry.nbytes for entry in self.entries)

    def is_written(self, folder: Path) -> bool:
        """Returns whether the file is there with the planned size and header. A file gets its name only when it is complete."""
        path = folder / self.name
        if not path.is_file() or path.stat().st_size != self.nbytes:
            return False
        with path.open("rb") as file:
            return file.read(len(self.header)) == self.header

    def write(
        self, folder: Path, source: StoredWeights, advance: Callable[[int], None], *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Streams the entries from ``source``, at most ``bucket_bytes`` (or one row) at a time.

        Calls ``advance`` with the number of bytes after each write.
        """
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
    """Divides a box into boxes of consecutive rows, each of at most ``limit`` bytes, or one row."""
    row = math.prod(box.shape[1:]) * itemsize
    rows = max(1, limit // row)
    for start in range(box.start[0], box.stop[0], rows):
        stop = min(start + rows, box.stop[0])
        yield Box((start, *box.start[1:]), (stop, *box.stop[1:]))


def group_entries(entries: Sequence[FileEntry], limit: int) -> list[tuple[FileEntry, ...]]:
    """Groups consecutive entries so that each group has at most ``limit`` bytes, or one entry."""
    groups: list[list[FileEntry]] = []
    held = 0
    for entry in entries:
        if not groups or held + entry.nbytes > limit:
            groups.append([])
            held = 0
        groups[-1].append(entry)
        held += entry.nbytes
    return [tuple(group) for group in groups]
