"""The processes of a run started here, by role; only those are signalled."""

import json
import multiprocessing
import os
import pty
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from tepo_megatron.runtime.proc import Process

T = TypeVar("T")
CTRL_Z = "\x1a"
_POLL_S = 0.02
_ROLES = {
    "API server": "vllm.entrypoints.openai.api_server",
    "engine core": "VLLM::EngineCore",
    "vLLM worker": "VLLM::Worker",
    "supervisor": "tepo_megatron.runtime.supervise",
    "reward worker": "tepo_megatron.tasks.reward.worker",
}


def descendants(root: int) -> list[int]:
    return [root, *(state.pid for state in Process.below(root) if state.alive)]


def by_role(root: int, module: str) -> dict[str, list[int]]:
    """Adds ``parent``, ``rank 0`` … ``module``: what ranks run."""
    result: dict[str, list[int]] = {"parent": [root]}
    for pid in descendants(root)[1:]:
        line = Process.command_line(pid)
        for role, words in _ROLES.items():
            # The supervisor's line names the server's command, and the engine core of one worker may be a fork of the server.
            if words in line and not (role == "API server" and _ROLES["supervisor"] in line):
                result.setdefault(role, []).append(pid)
                break
        else:
            rank = Process.environment(pid).get("RANK")
            if rank is not None and f"-m {module} " in line:
                result.setdefault(f"rank {rank}", []).append(pid)
    return result


def wait_until(ready: Callable[[], T], timeout_s: float, what: str) -> T:
    deadline = time.monotonic() + timeout_s
    while not (value := ready()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(_POLL_S)
    return value


def wait_gone(pids: Sequence[int], timeout_s: float) -> list[int]:
    """Returns those still running."""
    with suppress(TimeoutError):
        wait_until(lambda: not any(map(Process.start_time, pids)), timeout_s, "")
    return [pid for pid in pids if Process.start_time(pid)]


def signal_all(pids: Sequence[int], *numbers: signal.Signals) -> None:
    """Passes over those that have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            for number in numbers:
                os.kill(pid, number)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    pids = descendants(process.pid)
    signal_all(pids, signal.SIGCONT)
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
    signal_all(wait_gone(pids, 5), signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    wait_gone(pids, 30)


def listening(pids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(process, TCP port)."""
    for pid in pids:
        with suppress(psutil.Error):
            for connection in psutil.Process(pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    yield pid, connection.laddr.port


def in_fork(work: Callable[..., Any], *arguments: Any, limit_s: float) -> Any:
    """Returns ``work(*arguments)`` of a fork, as JSON; None if it did not finish."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(json.dumps(work(*arguments))))
    child.start()
    child.join(limit_s)
    if child.is_alive():
        child.kill()
    child.join()
    return None if answers.empty() else json.loads(answers.get())


class Terminal:
    """A shell with job control; ``printed`` is what it shows."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.pid, self._end = pty.fork()
        if not self.pid:
            os.chdir(folder)
            # nohup, or a script's &, may have started this process
            for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.environ |= {"PS1": "", "TERM": "dumb", **environment}
            os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])  # noqa: S606  # the shell itself
        self.printed, self._seen, self._open = "", 0, True
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # the shell has ended
            while self._open:  # a read in progress would keep a closed terminal open
                if select.select([self._end], [], [], 0.05)[0]:
                    self.printed += os.read(self._end, 65536).decode(errors="replace")

    def press(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def wait(self, ready: Callable[[], Any], timeout_s: float, what: str) -> None:
        try:
            wait_until(ready, timeout_s, what)
        except TimeoutError as error:
            raise RuntimeError(f"{error}; the terminal has {self.printed[-2000:]!r}") from None

    def wait_for(self, text: str, timeout_s: float) -> None:
        """``text`` must be new since the last call."""
        self.wait(lambda: text in self.printed[self._seen :], timeout_s, repr(text))
        self._seen = self.printed.index(text, self._seen) + len(text)

    @property
    def jobs(self) -> list[int]:
        return descendants(self.pid)[1:]

    def hang_up(self) -> None:
        if self._open:
            self._open = False
            self._reader.join()
            os.close(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pids = descendants(self.pid)
        self.hang_up()
        signal_all(pids, signal.SIGCONT, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
