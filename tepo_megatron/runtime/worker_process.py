"""The parent's side of children that exchange JSON lines over pipes."""

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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from typing import IO, Any, Generic, Literal, NoReturn, TypeVar

from tepo_megatron.runtime.preemption import not_ignored
from tepo_megatron.runtime.proc import STOPPED, Process
from tepo_megatron.runtime.supervise import sweep
from tepo_megatron.runtime.text import echo, parse_json
from tepo_megatron.runtime.worker_child import WorkerLimits, running_time

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
                env={"PYTHONHASHSEED": "0", **os.environ},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._unfinished = b""

    def fileno(self) -> int:
        return self._stdout.fileno()

    def send(self, value: Any, timeout_s: float) -> None:
        """After ``timeout_s`` a part is written and no reply comes. Ignores an ended process."""
        remaining = memoryview(json.dumps(value).encode() + b"\n")
        deadline = running_time() + timeout_s
        try:
            while remaining:
                written = self._stdin.write(remaining)  # None if the pipe is full
                if written is None and not _is_ready(self._stdin, select.POLLOUT, max(0.0, deadline - running_time())):
                    return
                remaining = remaining[written or 0 :]
        except BrokenPipeError:
            return

    def _has_data(self, timeout_s: float) -> bool:
        return _is_ready(self._stdout, select.POLLIN, timeout_s)

    def receive(self) -> list[Any]:
        """Blocks until complete lines or a part arrive. Raises EOFError, or ValueError for a line that is not JSON."""
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            raise EOFError
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        return [parse_json(line, "its answer") for line in lines]

    def exit_status(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> str:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return "its output was closed"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    @property
    def stopped(self) -> bool:
        state = Process.read(self._process.pid)
        return state is not None and state.state in (STOPPED, "t")

    def close(self) -> None:
        """Its input's end ends it; otherwise it is killed after a second."""
        self._stdin.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_TIMEOUT_S)  # one that waits for a dead disk ends with it
        self._stdout.close()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.close()


_POLL_INTERVAL_S = 0.005


def _is_ready(file: Any, event: int, timeout_s: float) -> bool:
    waits = select.poll()  # select() takes no number above 1023
    waits.register(file, event)
    return bool(waits.poll(1000 * timeout_s))


class _ForkedProcess:
    """Runs ``main``, which need not be importable, in a fork, with pipes as standard input and output.

    The child has one thread: ``main`` must not acquire a C library's lock that another may hold.
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
    """Never returns, so that the parent's frames stay."""
    code = 1
    try:
        gc.freeze()  # the parent's objects are not collected here: that could close files that reuse their numbers
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in not_ignored():
            signal.signal(number, signal.SIG_DFL)
        os.dup2(requests, 0)
        os.dup2(replies, 1)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # An open pipe would keep servers and other workers alive.
        os.closerange(3, most if most != resource.RLIM_INFINITY else 1 << 20)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        main()
        code = 0
    except BaseException:
        echo(traceback.format_exc(), err=True)
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


_START_TIMEOUT_S = 120.0
"""User code may import symbolic mathematics, which takes seconds."""

_NO_ANSWER = "the {}'s process wrote something else than an answer to the trainer's pipe"

_EXTRA_TIME_S = 2.0  # a concurrent worker ends late calls itself


@dataclass(eq=False)
class WorkerCall(ABC):
    number: int
    deadline: float = field(default=float("inf"), init=False)
    method: str = field(default="", init=False)
    """It is named if the call takes too long."""

    @property
    @abstractmethod
    def message(self) -> list[Any]: ...


C = TypeVar("C", bound=WorkerCall)
End = Literal["died", "late", "stopped", "grown"]


@dataclass(eq=False)
class Worker(Generic[C]):
    process: WorkerProcess
    ready: bool = False
    concurrent: bool = False
    worn: bool = False
    """It is replaced when it is no longer busy."""
    pending: deque[C] = field(default_factory=deque)
    """They are sent when it reads."""
    start_deadline: float = field(default_factory=lambda: running_time() + _START_TIMEOUT_S)

    @property
    def running(self) -> list[C]:
        return list(self.pending) if self.concurrent else list(self.pending)[:1]

    @property
    def late(self) -> list[C]:
        now = running_time()
        return [call for call in self.running if now >= call.deadline]

    @property
    def deadline(self) -> float:
        if not self.ready:
            return self.start_deadline
        return min((call.deadline for call in self.running), default=float("inf"))


W = TypeVar("W", bound=Worker[Any])


class WorkerPool(ABC, Generic[W, C]):
    """Children that run user code, replaced if they die, hang or grow too large. One thread uses it."""

    _workers: list[W]

    def __init__(self, make: Callable[[], W], config: Any, *, names: tuple[str, str, str], setup: Mapping[str, Any]) -> None:
        """``config`` is a section of the configuration; ``names``: the code's kind, the section, and the code's setting.

        Raises ValueError for unusable code, RuntimeError if a worker does not start.
        """
        kind, section, self._setting = names
        fields = ("kwargs", "timeout_s", "memory_mb", "file_mb", "run_code")
        self._setup = {name: getattr(config, name) for name in fields}
        self._setup |= {"path": sys.path, "network": not config.cuts_network, **setup}
        self._make, self._limits = make, WorkerLimits.of(kind, section, self._setup)
        self._workers = []
        self._selector = selectors.DefaultSelector()
        self._facts: Mapping[str, Any] = {}
        try:
            for _ in range(config.workers):
                self._start()
            while not all(worker.ready for worker in self._workers):
                self._wait(_START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    @property
    def notice(self) -> str | None:
        """A limit that this machine's kernel lacks."""
        return self._facts["notice"]

    def close(self) -> None:
        for worker in self._workers:
            worker.process.close()
        self._workers = []
        self._selector.close()

    @abstractmethod
    def _answered(self, worker: W, call: C, answer: Any, seconds: float) -> None: ...

    def _is_answer(self, call: C, answer: Any) -> bool:
        return True

    @abstractmethod
    def _lost(self, worker: W, why: str, end: End) -> None:
        """Another worker has to take its calls; a new one has been started."""

    def _start(self, **setup: Any) -> W:
        sweep()  # folders of programs that a killed worker ran
        worker = self._make()
        self._workers.append(worker)
        self._selector.register(worker.process, selectors.EVENT_READ, worker)
        worker.process.send({**self._setup, **setup}, _START_TIMEOUT_S)
        return worker

    def _start_like(self, worker: W) -> None:
        self._start()

    def _send(self, worker: W, calls: Sequence[C]) -> None:
        for call in calls:
            call.deadline = self._deadline(worker)
        worker.pending.extend(calls)
        if worker.ready and calls:
            worker.process.send([[call.number, *call.message] for call in calls], self._limits.timeout_s)

    def _deadline(self, worker: W) -> float:
        return running_time() + self._limits.timeout_s + (_EXTRA_TIME_S if worker.concurrent else 0.0)

    def _wait(self, timeout_s: float) -> None:
        due = min((worker.deadline for worker in self._workers), default=float("inf"))
        patience = max(0.0, min(timeout_s, due - running_time())) if due < float("inf") else 0.0
        readable = {key.data for key, _ in self._selector.select(patience)}
        for worker in list(self._workers):
            if worker in readable:
                self._take_replies(worker)
            elif running_time() >= worker.deadline:
                why = f"it took longer than {_START_TIMEOUT_S:g} s"
                if worker.ready:
                    why = self._limits.took_too_long(worker.late[0].method)
                self._replace(worker, why, "stopped" if worker.process.stopped else "late")

    def _take_replies(self, worker: W) -> None:
        try:
            replies = worker.process.receive()
        except EOFError:
            self._replace(worker, self._limits.ended(worker.process.exit_status()), "died")
            return
        except ValueError:
            replies = [None]
        for reply in replies:
            match reply:
                case {} if not worker.ready and ("error" in reply or {"notice", "concurrent"} <= reply.keys()):
                    self._begin(worker, reply)
                    continue
                case [int() as number, answer, int() | float() as took, bool() as last, bool() as worn] if 0 <= took < 1e9:
                    call = next((call for call in worker.pending if worker.ready and call.number == number), None)
                case _:
                    call = None
            if call is None or not self._is_answer(call, answer):
                self._replace(worker, _NO_ANSWER.format(self._limits.what), "died")
                return
            worker.pending.remove(call)
            worker.worn = worn
            self._answered(worker, call, answer, took)
            if last:
                self._replace(worker, "its worker had grown too large", "grown")
                return
        if worker.pending and not worker.concurrent:
            worker.pending[0].deadline = self._deadline(worker)  # its turn has come

    def _begin(self, worker: W, reply: Mapping[str, Any]) -> None:
        if "error" in reply:
            raise ValueError(reply["error"])
        worker.ready, worker.concurrent, self._facts = True, reply["concurrent"], reply
        calls = list(worker.pending)
        worker.pending.clear()
        self._send(worker, calls)

    def _replace(self, worker: W, why: str, end: End) -> None:
        if not worker.ready:
            raise RuntimeError(f"a worker for {self._setting} did not start: {why}")
        self._selector.unregister(worker.process)
        self._workers.remove(worker)
        worker.process.kill()
        self._start_like(worker)
        self._lost(worker, why, end)
