"""A child process that is spoken to in JSON lines over pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

_CLOSE_TIMEOUT_S = 1.0


class WorkerProcess:
    """``python -m MODULE`` in a session of its own, so that a Ctrl-C in the terminal does not reach it.

    Starting it is safe in a process with threads: nothing runs between fork and exec. Can be given to a selector.
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
        """The descriptor that becomes readable when ``receive`` has something, or the process ended."""
        return self._stdout.fileno()

    def send(self, value: Any) -> None:
        """Write one JSON line. To a process that has ended this does nothing: ``receive`` will say so."""
        remaining = memoryview(json.dumps(value).encode() + b"\n")
        try:
            while remaining:
                remaining = remaining[self._stdin.write(remaining) :]
        except BrokenPipeError:
            return

    def receive(self) -> list[Any]:
        """The values of the lines that are complete; blocks if nothing was written.

        Raises:
            EOFError: the process ended.
        """
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            raise EOFError
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def exit_status(self) -> str:
        """How a process that closed its output ended, in words."""
        try:
            code = self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "its output was closed"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def close(self) -> None:
        """Close its input, which ends it; kill it if it does not end within a second."""
        self._stdin.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self.close()
