"""Files of a folder that is being made, each planned to the byte before it is written, so that it can be recognised later."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from tepo_megatron.bridge.geometry import Box
from tepo_megatron.bridge.storage.stored import DTYPES, StoredWeights

BUCKET_BYTES = 32 * 2**20
"""How much of a tensor is held at a time."""


@dataclass(frozen=True)
class Piece:
    """``box`` of ``tensor``, to be written under ``key`` in ``dtype`` (safetensors' name of it)."""

    key: str
    tensor: str
    box: Box
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.box.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Part:
    """One safetensors file; ``name`` is its path below the folder."""

    name: str
    pieces: tuple[Piece, ...]

    @cached_property
    def header(self) -> bytes:
        """What precedes the tensors' bytes: the length, and the table of names, types, shapes and offsets as JSON."""
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for piece in self.pieces:
            begin, end = end, end + piece.nbytes
            table[piece.key] = {"dtype": piece.dtype, "shape": list(piece.box.shape), "data_offsets": [begin, end]}
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self.header) + sum(piece.nbytes for piece in self.pieces)

    def is_written(self, folder: Path) -> bool:
        """Whether the file is there with the planned size and header. It is given its name only when it is complete."""
        path = folder / self.name
        if not path.is_file() or path.stat().st_size != self.nbytes:
            return False
        with path.open("rb") as file:
            return file.read(len(self.header)) == self.header

    def write(
        self, folder: Path, source: StoredWeights, advance: Callable[[int], None], *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Streams the pieces from ``source``, at most ``bucket_bytes`` (or one row) at a time, and tells ``advance`` how many
        bytes were written.
        """
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".unfinished")
        with unfinished.open("wb") as file:
            file.write(self.header)
            for piece in self.pieces:
                dtype = DTYPES[piece.dtype]
                for box in _buckets(piece.box, dtype.itemsize, bucket_bytes):
                    bucket = torch.empty(box.shape, dtype=dtype)
                    source.read(piece.tensor, box, bucket)
                    file.write(bucket.view(torch.uint8).numpy().data)
                    advance(bucket.nbytes)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)


def _buckets(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """The box as runs of its rows, each of at most ``limit`` bytes, or one row."""
    row = math.prod(box.shape[1:]) * itemsize
    rows = max(1, limit // row)
    for start in range(box.start[0], box.stop[0], rows):
        stop = min(start + rows, box.stop[0])
        yield Box((start, *box.start[1:]), (stop, *box.stop[1:]))


def pack(pieces: Sequence[Piece], limit: int) -> list[tuple[Piece, ...]]:
    """Consecutive pieces in groups of at most ``limit`` bytes, or one piece."""
    groups: list[list[Piece]] = []
    held = 0
    for piece in pieces:
        if not groups or held + piece.nbytes > limit:
            groups.append([])
            held = 0
        groups[-1].append(piece)
        held += piece.nbytes
    return [tuple(group) for group in groups]
