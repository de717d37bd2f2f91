"""The worker's side of a child process. Imports only the standard library."""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import linecache
import os
import resource
import signal
import socket
import stat
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from tepo_megatron.runtime.streams import outlive_readers

NO_MEMORY = 77  # exit status of a worker without memory to report that

_GROWTH = 0.25  # of its memory limit, that a worker may keep between calls


def redirect_standard_streams() -> tuple[BinaryIO, FileIO]:
    """Returns pipes to the parent. User code prints to stderr, and reads an empty input."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = FileIO(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    outlive_readers()
    return requests, replies


def read_lines(requests: BinaryIO, inbox: SimpleQueue[Any]) -> None:
    """A thread runs this: the end of the input ends the process even during user code."""
    try:
        for line in requests:
            inbox.put(json.loads(line))
    except MemoryError:
        os._exit(NO_MEMORY)
    if os.getpgrp() == os.getpid():  # the processes of the user's code end too
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def limit_processor_time(timeout_s: float) -> None:
    """Ends user code after the parent died: a backtracking regular expression holds the interpreter's lock, and blocks
    ``read_lines``.
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


OPEN_FILES = 256  # and sockets

_MB = 10**6
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


def leave_network() -> str | None:
    """Returns None, or why the kernel refuses.

    Call it before there is a second thread. Without privileges it also enters a user namespace.
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
    """Call it before user code is imported."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, open_files)


def limit_memory(megabytes: int) -> int:
    """``megabytes`` (10⁶ bytes) come on top of the present size, which it returns in bytes."""
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
    """Returns private writable memory, which RLIMIT_DATA limits; 0 if unknown."""
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
    """Later the process may have no file left to open."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY)
    except FileNotFoundError:
        return None


def forget_memory_file() -> None:
    """In a fork the parent's file is closed."""
    _memory_file.cache_clear()


def _lower(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


_LONGEST_ERROR = 500
_NO_NETWORK = (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_HINTS = {
    **dict.fromkeys(("signal 6", "signal 7", "signal 11"), "a C library does this that gets no more memory than {memory}"),
    "signal 9": "the kernel does this when the machine's memory runs out",
    f"exit status {NO_MEMORY}": "it got no more memory than {memory}",
}


class RememberedFailures:
    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._causes: OrderedDict[bytes, str] = OrderedDict()

    def add(self, key: bytes, cause: str) -> None:
        self._causes[key] = cause
        if len(self._causes) > self._most:
            self._causes.popitem(last=False)

    def get(self, key: bytes) -> str | None:
        if key in self._causes:
            self._causes.move_to_end(key)
        return self._causes.get(key)


def why_it_ended(exit_status: str, memory_mb: int, *, what: str = "verifier", section: str = "reward") -> str:
    """``section`` has the limits of ``what`` in the configuration."""
    hint = _HINTS.get(exit_status, "").format(memory=f"{section}.memory_mb = {memory_mb}")
    return f"the {what}'s process ended ({exit_status}){'; ' if hint else ''}{hint}"


def why_it_raised(error: BaseException, verifier: Callable[..., Any], setup: Mapping[str, Any]) -> str:
    """``setup`` has the limits by name; for others than verifiers also "what" and "section"."""
    what, section = setup.get("what", "verifier"), setup.get("section", "reward")
    if isinstance(error, MemoryError):
        return f"the {what} needed more memory than {section}.memory_mb = {setup['memory_mb']}{_place(error, verifier)}"
    text = f"the {what} raised {type(error).__name__}: {error}"
    return f"{text[:_LONGEST_ERROR]}{_limit_behind(error, setup)}{_place(error, verifier)}"


def _limit_behind(error: BaseException, setup: Mapping[str, Any]) -> str:
    what, section = setup.get("what", "verifier"), setup.get("section", "reward")
    for each in _chain(error):
        if not isinstance(each, OSError):
            continue
        if each.errno == errno.EFBIG:
            return f" ({_a(what)}'s files may have {section}.file_mb = {setup['file_mb']})"
        if each.errno == errno.EMFILE:
            return f" ({_a(what)} may have {OPEN_FILES} files open)"
        if not setup["network"] and (isinstance(each, socket.gaierror) or each.errno in _NO_NETWORK):
            return f" (this {what} has no network; {section}.network=true gives it one)"
    return ""


def _a(what: str) -> str:
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def place_of(verifier: Callable[..., Any], line: int | None = None) -> str:
    """Returns ``, at file:line: "…"``, or ""."""
    code = getattr(verifier, "__code__", None)
    if code is None:
        return ""
    line = code.co_firstlineno if line is None else line
    return f', at {code.co_filename}:{line}: "{linecache.getline(code.co_filename, line).strip()[:120]}"'


def _place(error: BaseException, verifier: Callable[..., Any]) -> str:
    code = getattr(verifier, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__) if code is not None else ()
    lines = [frame.lineno for frame in frames if code is not None and frame.filename == code.co_filename]
    return place_of(verifier, lines[-1] if lines else None)
