"""The worker's side of a child process; ``worker_process`` is the parent's. Imports only the standard library.

Input: JSON lines with the setup, then lists of calls ``[number, …]``. Output: ``{"ready": true, "notice": …, "concurrent": …}``
with more facts, or ``{"error": text}``; then ``[number, answer, seconds, last, worn]``; ``last``: the process ends; ``worn``:
it ends when it is no longer busy, and should get nothing new. Without ``concurrent`` answers are in order.
"""

from __future__ import annotations

import asyncio
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
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, BinaryIO, Protocol

from tepo_megatron.runtime.text import outlive_readers

_NO_MEMORY = 77  # exit status of a worker without memory to report that

_GROWTH, _BUSY_GROWTH = 0.25, 0.5  # of its memory limit: what a worker may keep between calls, or hold while it is busy

OPEN_FILES = 256  # and sockets

_MB = 10**6

_STATM = "/proc/self/statm"

_TICK_S, _GAP_S = 0.25, 1.0


class _RunningClock:
    def __init__(self) -> None:
        self.pid, self._lock = os.getpid(), Lock()
        self._time = self._last = time.monotonic()
        Thread(target=self._tick, name="clock", daemon=True).start()

    def _tick(self) -> None:
        while True:
            time.sleep(_TICK_S)
            self.now()

    def now(self) -> float:
        with self._lock:
            gap = time.monotonic() - self._last
            self._last += gap
            self._time += gap if gap < _GAP_S else _TICK_S
            return self._time


_clock: _RunningClock | None = None


def running_time() -> float:
    """As ``time.monotonic``, without time in which the process was stopped, as with its job (``scontrol suspend``)."""
    global _clock
    if _clock is None or _clock.pid != os.getpid():  # a fork has no thread
        _clock = _RunningClock()
    return _clock.now()


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """As ``asyncio.timeout``, but counts ``running_time``."""
    loop, end = asyncio.get_running_loop(), running_time() + seconds
    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds, lambda: check())

        def check() -> None:
            nonlocal timer
            if (left := end - running_time()) > 0:
                timer = loop.call_later(left, check)
            else:
                limit.reschedule(loop.time())

        try:
            yield limit
        finally:
            timer.cancel()


class _Served(Protocol):
    """``busy``: the process may not end now; ``worn``: it should; ``facts`` go to the parent."""

    @property
    def concurrent(self) -> bool: ...
    @property
    def busy(self) -> bool: ...
    @property
    def worn(self) -> bool: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...
    async def answer(self, *call: Any) -> Any: ...
    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs an ``answer``, unless it is ``concurrent``."""


def serve(
    make: Callable[[Mapping[str, Any]], _Served],
    what: str,
    open_files: Callable[[Mapping[str, Any]], int] = lambda _: OPEN_FILES,
) -> None:
    """``make`` gets the setup and may raise ValueError. The exit status tells of too little memory."""
    for number in (signal.SIGINT, signal.SIGUSR1):  # Slurm may send them to all processes of a step; the trainer acts on them
        signal.signal(number, signal.SIG_IGN)
    try:
        _serve(make, what, open_files)
    except MemoryError:
        os._exit(_NO_MEMORY)


def _serve(make: Callable[[Mapping[str, Any]], _Served], what: str, open_files: Callable[[Mapping[str, Any]], int]) -> None:
    requests, reply = redirect_standard_streams()
    line = requests.readline()
    if not line:
        return
    setup = json.loads(line)
    # Before a second thread starts: the kernel moves only one at a time.
    refusal = None if setup["network"] else leave_network()
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, open_files(setup))
    running_time()  # starts its thread, which does not count to the memory limit
    inbox: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_read_lines, args=(requests, inbox), daemon=True).start()
    sys.path[:] = setup["path"]
    try:
        served = make(setup)
    except ValueError as error:
        reply({"error": str(error)})
        return
    desk = _Desk(served, setup, reply)
    notice = refusal and f"{what}s keep their network: {refusal}"
    reply({"ready": True, "notice": notice, "concurrent": served.concurrent, **served.facts})
    if served.concurrent:
        asyncio.run(desk.answer_concurrently(inbox))
    while not desk.ended:
        for call in inbox.get():
            served.run(desk.answer(*call))


class _Desk:
    def __init__(self, served: _Served, setup: Mapping[str, Any], reply: Callable[[Any], None]) -> None:
        self._served, self._setup, self._reply = served, setup, reply
        # Later the process may have no file left to open.
        self._memory = os.open(_STATM, os.O_RDONLY) if os.path.exists(_STATM) else None
        self._first_size = self._size()
        if sys.platform == "linux":  # elsewhere the kernel does not count them
            _lower(resource.RLIMIT_DATA, self._size() + setup["memory_mb"] * _MB)
        self.ended = False

    async def answer(self, number: int, *call: Any) -> None:
        # Ends user code after the parent died: a backtracking regular expression holds the interpreter's lock, and blocks
        # ``_read_lines``.
        signal.setitimer(signal.ITIMER_PROF, 60 + 10 * self._setup["timeout_s"])
        _limit_file_size(self._setup["file_mb"])
        started = time.monotonic()
        answer = await self._served.answer(*call)
        if not self.ended:
            worn = self._has_grown() or not _has_a_free_file() or self._served.worn
            self.ended = worn and not self._served.busy
            self._reply([number, answer, time.monotonic() - started, self.ended, worn])

    async def answer_concurrently(self, inbox: SimpleQueue[Any]) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        running: set[asyncio.Task[None]] = set()

        def finish(task: asyncio.Task[None]) -> None:
            running.discard(task)
            if self.ended:
                ended.set()

        def begin(calls: list[Any]) -> None:
            for call in calls:
                task = loop.create_task(self.answer(*call))
                running.add(task)
                task.add_done_callback(finish)

        def hand_over() -> None:
            while True:
                loop.call_soon_threadsafe(begin, inbox.get())

        Thread(target=hand_over, daemon=True).start()
        await ended.wait()
        os._exit(0)  # another worker receives the open calls

    def _has_grown(self) -> bool:
        share = _BUSY_GROWTH if self._served.busy else _GROWTH
        most = self._first_size + int(share * self._setup["memory_mb"] * _MB)
        if self._size() <= most:
            return False
        gc.collect()
        return self._size() > most

    def _size(self) -> int:
        """Bytes of private writable memory, which RLIMIT_DATA limits; 0 if unknown."""
        file = self._memory
        return 0 if file is None else int(os.pread(file, 200, 0).split()[5]) * resource.getpagesize()


def redirect_standard_streams() -> tuple[BinaryIO, Callable[[Any], None]]:
    """Returns the parent's pipe, and a function that sends it JSON. User code prints to stderr and reads nothing."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = FileIO(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    outlive_readers()

    def reply(value: Any) -> None:
        remaining = memoryview(json.dumps(value).encode() + b"\n")
        while remaining:
            remaining = remaining[replies.write(remaining) :]

    return requests, reply


def _read_lines(requests: BinaryIO, inbox: SimpleQueue[Any]) -> None:
    """The input's end ends the process even during user code."""
    try:
        for line in requests:
            if not line.endswith(b"\n"):
                break  # its writer was killed
            inbox.put(json.loads(line))
    except MemoryError:
        os._exit(_NO_MEMORY)
    if os.getpgrp() == os.getpid():  # the processes of the user's code end too
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


def leave_network() -> str | None:
    """Returns None, or why the kernel refuses.

    Call it before a second thread starts. Without privileges it also enters a user namespace.
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


def _limit_file_size(megabytes: int) -> None:
    status = os.fstat(2)
    log = status.st_size if stat.S_ISREG(status.st_mode) else 0
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = log + megabytes * _MB
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _has_a_free_file() -> bool:
    try:
        os.close(os.dup(2))
    except OSError:
        return False
    return True


def _lower(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


_LONGEST_ERROR = 500
_NO_NETWORK = (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_HINTS = {
    **dict.fromkeys(("signal 6", "signal 7", "signal 11"), "a C library does this that gets no more memory than {memory}"),
    "signal 9": "the kernel does this when the machine's memory runs out",
    f"exit status {_NO_MEMORY}": "it got no more memory than {memory}",
}


@dataclass(frozen=True)
class WorkerLimits:
    """Limits of user code, with sentences for excess. ``what``: the code; ``section``: the configuration's with the limits."""

    what: str
    section: str
    timeout_s: float
    memory_mb: int
    file_mb: int
    network: bool

    @classmethod
    def of(cls, what: str, section: str, setup: Mapping[str, Any]) -> WorkerLimits:
        return cls(what, section, *(setup[name] for name in ("timeout_s", "memory_mb", "file_mb", "network")))

    def took_too_long(self, method: str = "") -> str:
        where = f" in {method}" if method else ""
        return f"the {self.what} took longer{where} than {self.section}.timeout_s = {self.timeout_s:g} s"

    def ended(self, exit_status: str) -> str:
        hint = _HINTS.get(exit_status, "").format(memory=f"{self.section}.memory_mb = {self.memory_mb}")
        return f"the {self.what}'s process ended ({exit_status}){'; ' if hint else ''}{hint}"

    def raised(self, error: BaseException, function: Callable[..., Any]) -> str:
        code = getattr(function, "__code__", None)
        frames = traceback.extract_tb(error.__traceback__) if code is not None else ()
        lines = [frame.lineno for frame in frames if code is not None and frame.filename == code.co_filename]
        place = place_of(function, lines[-1] if lines else None)
        if isinstance(error, MemoryError):
            return f"the {self.what} needed more memory than {self.section}.memory_mb = {self.memory_mb}{place}"
        text = f"the {self.what} raised {type(error).__name__}: {error}"
        return f"{text[:_LONGEST_ERROR]}{self._limit_behind(error)}{place}"

    def _limit_behind(self, error: BaseException) -> str:
        one = f"{'an' if self.what[0] in 'aeiou' else 'a'} {self.what}"
        for cause in _chain(error):
            if not isinstance(cause, OSError):
                continue
            if cause.errno == errno.EFBIG:
                return f" ({one}'s files may have {self.section}.file_mb = {self.file_mb})"
            if cause.errno == errno.EMFILE:
                return f" ({one} may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files open)"
            if not self.network and (isinstance(cause, socket.gaierror) or cause.errno in _NO_NETWORK):
                return f" (this {self.what} has no network; {self.section}.network=true gives it one)"
        return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def place_of(function: Callable[..., Any], line: int | None = None) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    line = code.co_firstlineno if line is None else line
    return f', at {code.co_filename}:{line}: "{linecache.getline(code.co_filename, line).strip()[:120]}"'
