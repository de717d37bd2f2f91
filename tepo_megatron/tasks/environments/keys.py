"""Keys in files, which whoever runs environments or agents elsewhere must have."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

SETTING = "environment.key_file"


def make_key(path: Path, setting: str = SETTING) -> str:
    """The key in a file that only its owner reads; made if it is not there. ``setting`` names the file in sentences.

    Raises ValueError for one that others can read.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
    return read_key(path, setting)


def read_key(path: Path, setting: str = SETTING) -> str:
    """The key of a file. Raises ValueError: there is none, or others than its owner can read or write it."""
    try:
        found, key = path.stat(), path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(
            f"{setting} = {path} cannot be read ({error.strerror}); 'tepo environment serve' writes it, and it must "
            "be where the trainer sees it"
        ) from error
    if stat.S_IMODE(found.st_mode) & (stat.S_IRWXG | stat.S_IRWXO) or found.st_uid != os.geteuid():
        raise ValueError(f"{setting} = {path} can be read by others than you; chmod 600 it, or remove it")
    if not key:
        raise ValueError(f"{setting} = {path} is empty; remove it, and another is written")
    return key
