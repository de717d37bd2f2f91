"""A digest of a folder's weights, by samples of them: whether two folders hold the same model. Standard library only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TENSORS, _BYTES = 64, 4096
"""How many tensors are sampled, and how much of each. In bfloat16 a small update changes one value of a hundred: of so many
values that are some, wherever the update was."""


def sampled_digest(folder: Path) -> str | None:
    """Returns a digest of the safetensors of ``folder``: name, dtype and shape of every tensor, and 4 KiB in the middle of 64.

    A copy has the same, also where its tensors are divided otherwise into files; a trained model has another. Reads the headers
    and a quarter of a MiB. None: the folder has no safetensors. Raises ValueError that names a damaged file.
    """
    tensors = {name: (path, start, entry) for path in _files(folder) for name, start, entry in _header(path)}
    if not tensors:
        return None
    digest = hashlib.sha256()
    for name, (_, _, entry) in sorted(tensors.items()):
        digest.update(f"{name} {entry['dtype']} {entry['shape']}\n".encode())
    # By their names' digests, since every so manieth of a list could be the same of each layer.
    for name in sorted(tensors, key=lambda name: hashlib.sha256(name.encode()).digest())[:_TENSORS]:
        path, start, entry = tensors[name]
        begin, end = entry["data_offsets"]
        with path.open("rb") as file:
            file.seek(start + max(begin, (begin + end - _BYTES) // 2))
            digest.update(file.read(min(_BYTES, end - begin)))
    return digest.hexdigest()[:16]


def _files(folder: Path) -> list[Path]:
    """The files that the index names, or all where there is none."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    return [folder / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))]


def _header(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields each tensor's name, where the data of the file begin, and the tensor's dtype, shape and offsets in the data."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); copy or download it again") from error
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, 8 + length, entry
