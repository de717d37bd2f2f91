"""A child process that exchanges JSON lines with its parent over pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

_CLOSE_TIMEOUT_S = 1.0


class WorkerProcess:
    """Runs ``python -m MODULE`` in a session of its own, so that a Ctrl-C in the terminal does not reach it.

    Starting one is safe in a process with threads, since no code runs between fork and exec. A selector can wait for it.
    """

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._unfinished = b""

    def fileno(self) -> int:
        """The file descriptor that becomes readable when ``receive`` has data, or the process has ended."""
        return self._stdout.fileno()

    def send(self, value: Any) -> None:
        """Writes one JSON line. Does nothing if the process has ended, which ``receive`` then reports."""
        remaining = memoryview(json.dumps(value).encode() + b"\n")
        try:
            while remaining:
                remaining = remaining[self._stdin.write(remaining) :]
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
        """Kills the process."""
        self._process.kill()
        self.close()
