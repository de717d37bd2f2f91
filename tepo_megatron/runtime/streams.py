"""Standard streams that are closed, or lose their reader."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def open_closed_streams() -> None:
    """Puts ``/dev/null`` where the starter closed a stream (``>&-``): another file or socket would take its number, and what
    processes below print. Call it before any file is opened.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number and not _is_open(number):
                os.dup2(null, number)
                os.close(null)
                null = number
            os.set_inheritable(null, null == number)
            setattr(sys, name, os.fdopen(null, "w" if number else "r", closefd=False))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def outlive_readers() -> None:
    """Printing never fails from now on: work that writes files must not end because ``head`` has ended, a terminal is gone, or
    the log's disk is full.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        raw = getattr(stream.buffer, "raw", stream.buffer)  # python -u has no buffer
        if type(raw) is io.FileIO:
            stream.flush()
            lasting: Any = _LastingFile(raw.fileno(), "w", closefd=False)
            buffer = lasting if raw is stream.buffer else io.BufferedWriter(lasting)
            modes: dict[str, Any] = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, **modes))


class _LastingFile(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:  # nobody reads it any more
            return memoryview(data).nbytes
