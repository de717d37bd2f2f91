"""The parent's side of child processes that exchange JSON lines over pipes: verifiers, environments and loggers."""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import selectors
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from typing import IO, Any, Generic, NoReturn, Protocol, TypeVar

from tepo_megatron.runtime.proc import STOPPED, process_state

_CLOSE_TIMEOUT_S = 1.0


class WorkerProcess:
    """Runs ``python -m MODULE``, or ``forked`` in a fork of this process, in a new session, which Ctrl-C does not reach.

    Starting a module is safe in a process with threads; for a fork see :class:`ForkedProcess`. A selector can wait for it.
    """

    def __init__(self, module: str, forked: Callable[[], None] | None = None, stderr: IO[bytes] | None = None) -> None:
        self._process: subprocess.Popen[bytes] | ForkedProcess
        if forked is not None:
            self._process = ForkedProcess(forked)
        else:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._unfinished = b""

    def fileno(self) -> int:
        """The file descriptor that becomes readable when ``receive`` has data, or the process has ended."""
        return self._stdout.fileno()

    def send(self, value: Any, timeout_s: float) -> None:
        """Writes one JSON line. After ``timeout_s`` seconds only its beginning is written: the process does not read, and
        will not reply. Does nothing if the process has ended, which ``receive`` reports.
        """
        remaining = memoryview(json.dumps(value).encode() + b"\n")
        deadline = time.monotonic() + timeout_s
        try:
            while remaining:
                written = self._stdin.write(remaining)  # None where the pipe is full
                if written is None and not select.select([], [self._stdin], [], max(0.0, deadline - time.monotonic()))[1]:
                    return
                remaining = remaining[written or 0 :]
        except BrokenPipeError:
            return

    def receive(self) -> list[Any]:
        """Returns the values of the complete lines; blocks until something is written.

        Raises:
            EOFError: the process ended.
        """
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            raise EOFError
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def exit_status(self) -> str:
        """``signal N`` or ``exit status N`` of a process that closed its output."""
        try:
            code = self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "its output was closed"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped by a signal or a debugger; False if the system does not tell."""
        state = process_state(self._process.pid)
        return state is not None and state.state in (STOPPED, "t")

    def close(self) -> None:
        """Closes the process's input, which ends it; kills it if it has not ended after a second."""
        self._stdin.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()

    def kill(self) -> None:
        """Kills the process and its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.close()


_POLL_INTERVAL_S = 0.005


class ForkedProcess:
    """``main`` runs in a fork of this process, whose standard input and output are pipes from and to here.

    For a function that only this process has, such as one of a notebook's cells; nothing is pickled. The child has a copy of
    this process's memory, one thread, and no open files but its pipes and standard error. Safe in any thread if ``main``
    acquires no lock of a C library that another thread may hold. The methods are those of ``subprocess.Popen``.
    """

    def __init__(self, main: Callable[[], None]) -> None:
        requests, to_child = os.pipe()
        from_child, replies = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, see above
            pid = os.fork()
        if pid == 0:
            _run_child(main, requests, replies)
        os.close(requests)
        os.close(replies)
        self.pid = pid
        self.stdin, self.stdout = FileIO(to_child, "wb"), FileIO(from_child, "rb")
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal. Raises ``subprocess.TimeoutExpired``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._code is None:
            found, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            if found:
                self._code = os.waitstatus_to_exitcode(status)
            elif deadline is not None and time.monotonic() >= deadline:
                assert timeout is not None
                raise subprocess.TimeoutExpired("a forked worker", timeout)
            else:
                time.sleep(_POLL_INTERVAL_S)
        return self._code

    def kill(self) -> None:
        if self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _run_child(main: Callable[[], None], requests: int, replies: int) -> NoReturn:
    """Never returns, so that nothing of the parent is unwound."""
    code = 1
    try:
        gc.freeze()  # what is the parent's is not collected here: it may close files whose numbers are others' now
        os.setsid()
        _forget_signals()
        os.dup2(requests, 0)
        os.dup2(replies, 1)
        _close_others()
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def _close_others() -> None:
    """A pipe that stays open here would keep servers and other workers alive, which end when it is closed."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(3, most if most != resource.RLIM_INFINITY else 1 << 20)


START_TIMEOUT_S = 120.0
"""Seconds for a worker to start and to import user code; a library for symbolic mathematics needs several."""


class Call(Protocol):
    """``deadline``: the ``time.monotonic()`` after which the answer is late."""

    deadline: float


C = TypeVar("C", bound=Call)
W = TypeVar("W", bound="Worker[Any]")


@dataclass(eq=False)
class Worker(Generic[C]):
    """A started process and its calls. ``concurrent``: it runs several calls at once."""

    process: WorkerProcess
    ready: bool = False
    concurrent: bool = False
    pending: deque[C] = field(default_factory=deque)
    start_deadline: float = field(default_factory=lambda: time.monotonic() + START_TIMEOUT_S)

    @property
    def idle(self) -> bool:
        return self.ready and not self.pending

    @property
    def running(self) -> list[C]:
        """The calls in progress, without those that wait for the first."""
        return list(self.pending) if self.concurrent else list(self.pending)[:1]

    @property
    def deadline(self) -> float:
        """When the worker is late: with its start, or with one of the calls in progress."""
        if not self.ready:
            return self.start_deadline
        return min((call.deadline for call in self.running), default=float("inf"))


class WorkerSet(Generic[W]):
    """The workers of a pool, in a fixed order: which of them has answered, and which is late."""

    def __init__(self) -> None:
        self._workers: list[W] = []
        self._selector = selectors.DefaultSelector()

    def __iter__(self) -> Iterator[W]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def ready(self) -> bool:
        return all(worker.ready for worker in self._workers)

    def add(self, worker: W) -> None:
        self._workers.append(worker)
        self._selector.register(worker.process, selectors.EVENT_READ, worker)

    def kill(self, worker: W) -> None:
        """Kills the worker's process without reading its last output. :meth:`replace` puts another worker in its place."""
        self._selector.unregister(worker.process)
        worker.process.kill()

    def replace(self, killed: W, by: W) -> None:
        self._workers[self._workers.index(killed)] = by
        self._selector.register(by.process, selectors.EVENT_READ, by)

    def wait(self, timeout_s: float) -> Iterator[tuple[W, bool]]:
        """Waits until a process has written or ended, a deadline, or ``timeout_s``. Yields each readable worker with True, and
        each late one with False. The caller may replace and add workers meanwhile.
        """
        due = min((worker.deadline for worker in self._workers), default=float("inf"))
        patience = max(0.0, min(timeout_s, due - time.monotonic()))
        heard = {id(key.data) for key, _ in self._selector.select(patience)}
        for worker in list(self._workers):
            if id(worker) in heard:
                yield worker, True
            elif time.monotonic() >= worker.deadline:
                yield worker, False

    def close(self) -> None:
        """Ends all workers. May be called more than once."""
        for worker in self._workers:
            worker.process.close()
        self._workers = []
        self._selector.close()
