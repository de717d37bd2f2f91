"""What a verifier's process may take, by the kernel's own limits; it sets them itself. No import but the standard library's."""

from __future__ import annotations

import ctypes
import os
import resource
import stat
import sys
from functools import cache
from pathlib import Path

OPEN_FILES = 256
"""The most files and sockets that a verifier may have open."""

_MB = 10**6
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


def leave_network() -> str | None:
    """Moves this process into a network of its own, without any interface; ``None``, or why the kernel does not let it.

    To be called before there is a second thread. The process keeps its user and its files. A privileged one keeps everything;
    for others the kernel wants a user namespace, in which the user stays the same.
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
    """No core dumps, and a bound on open files; before the verifier is imported."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, open_files)


def limit_memory(megabytes: int) -> int:
    """Bounds the data of this process to what it has now and so many 10⁶ bytes; returns what it has now, in bytes."""
    now = data_bytes()
    if sys.platform == "linux":  # elsewhere the kernel does not count them
        _lower(resource.RLIMIT_DATA, now + megabytes * _MB)
    return now


def limit_file_size(megabytes: int) -> None:
    """Bounds every file that is written from now on; standard error may be a log, and may grow by as much again.

    Python ignores the signal, so that writing more raises ``OSError``.
    """
    status = os.fstat(2)
    log = status.st_size if stat.S_ISREG(status.st_mode) else 0
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    wanted = log + megabytes * _MB
    resource.setrlimit(resource.RLIMIT_FSIZE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def data_bytes() -> int:
    """The private writable memory of this process, which ``RLIMIT_DATA`` bounds; 0 where the system does not say."""
    file = _memory_file()
    return 0 if file is None else int(os.pread(file, 200, 0).split()[5]) * resource.getpagesize()


def has_a_free_file() -> bool:
    """Whether one more file can be opened."""
    try:
        os.close(os.dup(2))
    except OSError:
        return False
    return True


@cache
def _memory_file() -> int | None:
    """Opened once: later there may be no file left to open."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY)
    except FileNotFoundError:
        return None


def forget_memory_file() -> None:
    """In a fork, where the parent's is closed."""
    _memory_file.cache_clear()


def _lower(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))
