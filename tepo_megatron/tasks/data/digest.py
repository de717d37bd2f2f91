"""Digests of files."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal. Raises ValueError where it cannot be read."""
    digest = sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()
