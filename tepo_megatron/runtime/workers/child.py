"""What a worker process does whatever it runs: its pipes to the parent, its end with the parent, and how far it may grow."""

from __future__ import annotations

import gc
import json
import os
import signal
from io import FileIO
from queue import SimpleQueue
from typing import Any, BinaryIO

from tepo_megatron.runtime.workers.failure import NO_MEMORY
from tepo_megatron.runtime.workers.limits import data_bytes

_GROWTH = 0.25
"""The part of its memory that a worker may keep from one call to the next."""


def redirect_standard_streams() -> tuple[BinaryIO, FileIO]:
    """Returns the pipes to the parent. The user's code has them no longer: it prints to stderr, and reads an empty input."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = FileIO(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def read_lines(requests: BinaryIO, inbox: SimpleQueue[Any]) -> None:
    """Reads requests in a thread of its own, so that the end of the input ends the process also while the user's code runs."""
    try:
        for line in requests:
            inbox.put(json.loads(line))
    except MemoryError:
        os._exit(NO_MEMORY)
    if os.getpgrp() == os.getpid():  # what the user's code has started ends too
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def limit_processor_time(timeout_s: float) -> None:
    """Has the kernel end a process whose user's code runs on after the parent died.

    ``read_lines`` cannot: a regular expression that backtracks holds the interpreter's lock, so that no other thread runs. The
    limit counts processor time of all threads, and is far above the one that the parent enforces.
    """
    signal.setitimer(signal.ITIMER_PROF, 60 + 10 * timeout_s)


def has_grown(loaded: int, memory_mb: int) -> bool:
    """Whether the process keeps so much that a call would find less memory than another one before it."""
    most = loaded + int(_GROWTH * memory_mb * 10**6)
    if data_bytes() <= most:
        return False
    gc.collect()
    return data_bytes() > most


def reply(replies: FileIO, value: Any) -> None:
    """Writes one JSON line to the parent."""
    remaining = memoryview(json.dumps(value).encode() + b"\n")
    while remaining:
        remaining = remaining[replies.write(remaining) :]
