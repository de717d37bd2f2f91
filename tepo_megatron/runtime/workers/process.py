"""A child process that exchanges JSON lines with its parent over pipes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from tepo_megatron.runtime.proc import STOPPED, process_state
from tepo_megatron.runtime.workers.forked import ForkedProcess

_CLOSE_TIMEOUT_S = 1.0


class WorkerProcess:
    """Runs ``python -m MODULE`` in a session of its own, so that a Ctrl-C in the terminal does not reach it; or, where it is
    given, ``forked`` in a fork of this process.

    Starting a module is safe in a process with threads, since no code runs between fork and exec; for a fork see
    :class:`ForkedProcess`. A selector can wait for it.
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
        """Writes one JSON line, in ``timeout_s`` seconds or else only the beginning of it: the process is stopped then, and its
        reply does not come. Does nothing if the process has ended, which ``receive`` then reports.
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
        """Says how a process that closed its output ended: by which signal, or with which exit status."""
        try:
            code = self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "its output was closed"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    @property
    def stopped(self) -> bool:
        """Whether somebody has stopped the process (SIGSTOP); False where the system does not say."""
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
        """Kills the process, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.close()
