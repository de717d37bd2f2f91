"""The parent's side of child processes that exchange JSON lines over pipes."""

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

from tepo_megatron.runtime.preemption import not_ignored
from tepo_megatron.runtime.proc import STOPPED, process_state

_CLOSE_TIMEOUT_S = 1.0


class WorkerProcess:
    """Runs ``python -m MODULE``, or ``forked`` in a fork, in a new session, which Ctrl-C does not reach.

    A selector can wait for it.
    """

    def __init__(self, module: str, forked: Callable[[], None] | None = None, stderr: IO[bytes] | None = None) -> None:
        self._process: subprocess.Popen[bytes] | _ForkedProcess
        if forked is not None:
            self._process = _ForkedProcess(forked)
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
        return self._stdout.fileno()

    def send(self, value: Any, timeout_s: float) -> None:
        """After ``timeout_s`` a part is written, and no reply will come. Ignores an ended process."""
        remaining = memoryview(json.dumps(value).encode() + b"\n")
        deadline = time.monotonic() + timeout_s
        try:
            while remaining:
                written = self._stdin.write(remaining)  # None if the pipe is full
                if written is None and not select.select([], [self._stdin], [], max(0.0, deadline - time.monotonic()))[1]:
                    return
                remaining = remaining[written or 0 :]
        except BrokenPipeError:
            return

    def receive(self) -> list[Any]:
        """Blocks until complete lines or a part arrive. Raises EOFError."""
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            raise EOFError
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def exit_status(self) -> str:
        """Returns ``signal N`` or ``exit status N``."""
        try:
            code = self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "its output was closed"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    @property
    def stopped(self) -> bool:
        state = process_state(self._process.pid)
        return state is not None and state.state in (STOPPED, "t")

    def close(self) -> None:
        """The end of its input ends it; otherwise it is killed after a second."""
        self._stdin.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.close()


_POLL_INTERVAL_S = 0.005


class _ForkedProcess:
    """Runs ``main``, which need not be importable, in a fork, with pipes as standard input and output.

    The child has one thread. ``main`` must not acquire a C library's lock that another thread may hold.
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
        """The exit code is negative for a signal."""
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
        gc.freeze()  # the parent's objects are not collected here: that could close files that reuse their numbers
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
    for number in not_ignored():
        signal.signal(number, signal.SIG_DFL)


def _close_others() -> None:
    """An open pipe would keep servers and other workers alive."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(3, most if most != resource.RLIM_INFINITY else 1 << 20)


START_TIMEOUT_S = 120.0
"""User code may import symbolic mathematics libraries, which needs several seconds."""


class Call(Protocol):
    deadline: float


C = TypeVar("C", bound=Call)
W = TypeVar("W", bound="Worker[Any]")


@dataclass(eq=False)
class Worker(Generic[C]):
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
        return list(self.pending) if self.concurrent else list(self.pending)[:1]

    @property
    def deadline(self) -> float:
        if not self.ready:
            return self.start_deadline
        return min((call.deadline for call in self.running), default=float("inf"))


class WorkerSet(Generic[W]):
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
        """Loses its last output; :meth:`replace` it afterwards."""
        self._selector.unregister(worker.process)
        worker.process.kill()

    def replace(self, killed: W, by: W) -> None:
        self._workers[self._workers.index(killed)] = by
        self._selector.register(by.process, selectors.EVENT_READ, by)

    def wait(self, timeout_s: float) -> Iterator[tuple[W, bool]]:
        """Yields (readable worker, True) and (late worker, False)."""
        due = min((worker.deadline for worker in self._workers), default=float("inf"))
        patience = max(0.0, min(timeout_s, due - time.monotonic()))
        heard = {id(key.data) for key, _ in self._selector.select(patience)}
        for worker in list(self._workers):
            if id(worker) in heard:
                yield worker, True
            elif time.monotonic() >= worker.deadline:
                yield worker, False

    def close(self) -> None:
        for worker in self._workers:
            worker.process.close()
        self._workers = []
        self._selector.close()
