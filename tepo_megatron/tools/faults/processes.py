"""The processes of a run started here, by role; only those are signalled."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import psutil

from tepo_megatron.runtime.proc import Process

T = TypeVar("T")
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


def end_tree(process: subprocess.Popen[bytes]) -> None:
    pids = descendants(process.pid)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
    for pid in wait_gone(pids, 5):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
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
