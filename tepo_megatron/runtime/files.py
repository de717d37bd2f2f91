import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, TypeVar

from tepo_megatron.runtime.text import parse_json, valid_text

Failed = Callable[[Path, OSError], None]
T = TypeVar("T")

_SHORT_ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOLINK, errno.EAGAIN)
_PAUSES_S = (1.0, 4.0)


def with_retries(work: Callable[[], T]) -> T:
    """Tries again after errors of a shared disk that can be over in seconds. ``work`` may be repeated."""
    for pause_s in _PAUSES_S:
        try:
            return work()
        except OSError as error:
            if error.errno not in _SHORT_ERRORS:
                raise
        time.sleep(pause_s)
    return work()


def try_writing(folder: Path) -> None:
    """Raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())


def partial_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def is_file_name(name: object) -> bool:
    """Returns whether a file beside the one that names it may have this name."""
    if not isinstance(name, str) or "\0" in name or valid_text(name) != name:
        return False
    return name == Path(name).name != ".." and 0 < len(name.encode()) < 256


def write_atomically(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """``sync``: content survives a power cut. Raises OSError, leaving no partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    data = content.encode("utf-8", errors="backslashreplace") if isinstance(content, str) else content
    try:
        with partial.open("wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
    if sync:
        sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """A file's content, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # Linux's answer if a file system cannot sync folders
            raise
    finally:
        os.close(handle)


class LogFile:
    """Grows by whole pieces, and retries a failed one before the next."""

    def __init__(self, path: Path, failed: Failed | None = None) -> None:
        """``failed`` None: errors are raised."""
        self.path = path
        self._failed = failed
        self._waiting: list[bytes] = []
        self._end: int | None = None  # of the whole pieces, while a failed one may follow

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def read(self, what: str) -> Iterator[dict[str, Any]]:
        """Leaves out a last line that a crash cut off. Raises ValueError for other lines without an integer ``step``."""
        return parse_samples(self.path, read_lines(self.path), what, numbered=True)

    def is_cut(self) -> bool:
        with self.path.open("rb") as file:
            return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"

    def cut_after(self, step: int, what: str) -> None:
        """Drops all from the first line of a later step on, and a line that a crash cut off. Raises ValueError as ``read``."""
        remaining = sum(1 for _ in takewhile(lambda row: row["step"] <= step, self.read(what)))
        with self.path.open("rb") as file:
            size = sum(map(len, islice(file, remaining)))
        os.truncate(self.path, size)

    def append(self, piece: bytes) -> None:
        self._waiting.append(piece)
        self.flush()

    def forget_after(self, step: int) -> None:
        # A piece has lines of JSON, all of one step.
        pieces = [piece for piece in self._waiting if piece]
        self._waiting = [piece for piece in pieces if parse_json(piece.partition(b"\n")[0], "it")["step"] <= step]

    def flush(self) -> None:
        try:
            self._cut_failed()
            while self._waiting:
                self._write(self._waiting[0])
                del self._waiting[0]
        except OSError as error:
            with suppress(OSError):  # the next flush tries again
                self._cut_failed()
            if self._failed is None:
                raise
            self._failed(self.path, error)

    def _cut_failed(self) -> None:
        if self._end is not None:
            with suppress(FileNotFoundError):
                if self.path.stat().st_size > self._end:  # a device has no end to go back to
                    os.truncate(self.path, self._end)
            self._end = None

    def _write(self, piece: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab", buffering=0)
        self._end = file.seek(0, os.SEEK_END)
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        finally:
            file.close()  # a network's disk says only here that it is full
        self._end = None


def read_lines(path: Path) -> Iterator[str]:
    """Leaves out a last line that a crash cut off. Raises ValueError unless UTF-8."""
    # Not as text: a response may contain characters that Python, unlike JSON, treats as the end of a line.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                text = line[:-1].decode("utf-8")
            except UnicodeDecodeError as error:
                where = f"byte {error.start} of the line"
                raise ValueError(f"{path}:{number}: not UTF-8 text ({where}); remove the line") from error
            yield text


def parse_samples(
    path: Path, lines: Iterable[str], what: str = "sample", *, numbered: bool = False
) -> Iterator[dict[str, Any]]:
    """Raises ValueError for a line that is no object or, if they are ``numbered``, has no integer ``step``."""
    expected = "an object with an integer 'step'" if numbered else "an object"
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line, "it")
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not a {what}: {error}; remove the line") from error
        if not isinstance(row, dict) or (numbered and type(row.get("step")) is not int):
            raise ValueError(f"{path}:{number}: not a {what}: {expected} was expected; remove the line")
        yield row
