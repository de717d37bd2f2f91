"""The worker's side of a child process: pipes, end with the parent, kernel limits. Imports only the standard library."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import stat
import sys
from functools import cache
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

NO_MEMORY = 77
"""Exit status of a worker without memory to report that."""

_GROWTH = 0.25
"""Share of its memory limit that a worker may keep between calls."""


def redirect_standard_streams() -> tuple[BinaryIO, FileIO]:
    """Returns the pipes to the parent. User code prints to stderr instead, and reads an empty input."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = FileIO(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def read_lines(requests: BinaryIO, inbox: SimpleQueue[Any]) -> None:
    """Runs in a thread, so that the end of the input ends the process even during user code."""
    try:
        for line in requests:
            inbox.put(json.loads(line))
    except MemoryError:
        os._exit(NO_MEMORY)
    if os.getpgrp() == os.getpid():  # what the user's code has started ends too
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def limit_processor_time(timeout_s: float) -> None:
    """Makes the kernel end a process if its user code still runs after the parent died.

    ``read_lines`` cannot: a backtracking regular expression holds the interpreter's lock. The limit is far above the parent's.
    """
    signal.setitimer(signal.ITIMER_PROF, 60 + 10 * timeout_s)


def has_grown(loaded: int, memory_mb: int) -> bool:
    most = loaded + int(_GROWTH * memory_mb * 10**6)
    if data_bytes() <= most:
        return False
    gc.collect()
    return data_bytes() > most


def reply(replies: FileIO, value: Any) -> None:
    remaining = memoryview(json.dumps(value).encode() + b"\n")
    while remaining:
        remaining = remaining[replies.write(remaining) :]


OPEN_FILES = 256
"""Limit on a worker's open files and sockets."""

_MB = 10**6
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


def leave_network() -> str | None:
    """Enters a network namespace without interfaces. Returns None, or why the kernel refuses.

    Call it before there is a second thread. Without privileges it also enters a user namespace, with the same user.
    """
    if sys.platform != "linux":
        return f"{sys.platform} has no network namespaces"
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNET) == 0:
        return None
    if not os.access("/proc/self/uid_map", os.W_OK):
        return "this process may not say which user it is in a namespace"
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return os.strerror(ctypes.get_errno())
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path("/proc/self", name).write_text(text)
    return None


def limit_process(open_files: int = OPEN_FILES) -> None:
    """Disables core dumps and limits open files. Call it before user code is imported."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, open_files)


def limit_memory(megabytes: int) -> int:
    """Limits this process's data to the present size plus ``megabytes`` (10⁶ bytes). Returns the present size in bytes."""
    now = data_bytes()
    if sys.platform == "linux":  # elsewhere the kernel does not count them
        _lower(resource.RLIMIT_DATA, now + megabytes * _MB)
    return now


def limit_file_size(megabytes: int) -> None:
    status = os.fstat(2)
    log = status.st_size if stat.S_ISREG(status.st_mode) else 0
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    wanted = log + megabytes * _MB
    resource.setrlimit(resource.RLIMIT_FSIZE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def data_bytes() -> int:
    """Bytes of private writable memory, which RLIMIT_DATA limits; 0 if unknown."""
    file = _memory_file()
    return 0 if file is None else int(os.pread(file, 200, 0).split()[5]) * resource.getpagesize()


def has_a_free_file() -> bool:
    try:
        os.close(os.dup(2))
    except OSError:
        return False
    return True


@cache
def _memory_file() -> int | None:
    """Opened once: later the process may have no file left to open."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY)
    except FileNotFoundError:
        return None


def forget_memory_file() -> None:
    """For a fork, in which the parent's file is closed."""
    _memory_file.cache_clear()


def _lower(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))
