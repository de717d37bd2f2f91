"""Files of lines that grow while a run goes on, and do not end it when they cannot be written. Rank 0 only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Failed = Callable[[Path, OSError], None]
"""Is told of every attempt to write a file that failed."""


class LogFile:
    """A file that grows by whole pieces. What cannot be written waits, and is tried again with the next piece.

    The file is opened for each piece: a folder that was removed is made again, and a disk that was full is used when it is not.
    """

    def __init__(self, path: Path, failed: Failed) -> None:
        self.path = path
        self._failed = failed
        self._waiting: list[bytes] = []

    @property
    def waiting(self) -> int:
        """How many pieces are not on disk yet."""
        return len(self._waiting)

    def append(self, piece: bytes) -> None:
        """A reader finds the piece whole, or not at all (a crash may cut it off at the end of the file)."""
        self._waiting.append(piece)
        self.flush()

    def flush(self) -> None:
        """Tries to write what waits."""
        try:
            while self._waiting:
                _append(self.path, self._waiting[0])
                del self._waiting[0]
        except OSError as error:
            self._failed(self.path, error)


def raise_error(path: Path, error: OSError) -> None:
    """For a :class:`LogFile` whose failures are its caller's."""
    raise error


def read_lines(path: Path) -> tuple[list[str], bool]:
    """The whole lines of a file, without their line feeds, and whether a crash cut off one more.

    Raises ValueError with file and line for what is not UTF-8.
    """
    # Not splitlines(): a response may hold characters that it, unlike JSON, takes for the end of a line.
    *lines, rest = path.read_bytes().split(b"\n")
    read = []
    for number, line in enumerate(lines, start=1):
        try:
            read.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{number}: not UTF-8 text (byte {error.start} of the line); remove the line") from error
    return read, bool(rest)


def parse_samples(path: Path, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The rows of the lines of a file of samples. Raises ValueError with the line that is none."""
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not a sample: {error}; remove the line") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: not a sample: an object was expected; remove the line")
        yield row


def replace_text(path: Path, text: str) -> None:
    """Replaces a file in one move, so that a crash leaves the old one or the new one."""
    replace_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def replace_bytes(path: Path, data: bytes) -> None:
    """As :func:`replace_text`. What could not be written leaves nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


def _append(path: Path, piece: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError):  # what is no plain file has no end to go back to
                file.truncate(start)
            raise
