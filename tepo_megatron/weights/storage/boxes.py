"""Writes a rank's boxes of a checkpoint, with digests of what was meant to be written."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tepo_megatron.weights.geometry import Box
from tepo_megatron.weights.storage.manifest import FileRecord
from tepo_megatron.weights.storage.planned_files import FileEntry, PlannedFile
from tepo_megatron.weights.storage.stored import DTYPES, SHARDS

FILE_BYTES = 4 * 2**30
"""Size in bytes at which a file is closed and the next one begun."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class WrittenBoxes:
    """What a rank has written: its files by their paths below the checkpoint, and the bytes that it had to write in all.

    ``error`` is what the first write failed of; then not all files are there.
    """

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
    """Writes boxes as they come into ``folder/shards/STEM-00001.safetensors`` and so on, durably.

    Holds at most ``file_bytes``, or one box. ``metadata`` goes into the files' headers. After a failed write the boxes are
    still drawn to the end, and counted, so that an error can say how much room they need.
    """
    written = WrittenBoxes()
    held: dict[str, Tensor] = {}

    def flush() -> None:
        if held and written.error is None:
            name = f"{SHARDS}/{stem}-{len(written.files) + 1:05d}.safetensors"
            try:
                written.files[name] = _write_file(folder, name, held, metadata)
            except OSError as error:
                written.error = f"{folder / name}: {describe_os_error(error)}"
        held.clear()

    for key, tensor in boxes:
        if sum(kept.nbytes for kept in held.values()) + tensor.nbytes > file_bytes:
            flush()
        held[key] = tensor.detach().cpu().contiguous()
        written.bytes += tensor.nbytes
    flush()
    return written


def describe_os_error(error: OSError) -> str:
    """The system's own words for an error, and its name, such as "No space left on device (ENOSPC)"."""
    return f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'unknown')})"


def _write_file(folder: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    # By hand, not by safetensors' own writer: the digest is of what is in memory, so that it also shows a write that went
    # wrong, and a full disk is an error of the system with its name.
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
    """``os.write`` may write less than it is given, and writes no more than 2 GiB at once."""
    while data:
        data = data[os.write(handle, data) :]


def _whole(tensor: Tensor) -> Box:
    return Box((0,) * tensor.ndim, tuple(tensor.shape))
