"""A shell on a terminal of its own, as a user has it at a screen or over SSH."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import shlex
import signal
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

CTRL_Z = "\x1a"


def write_script(path: Path, text: str) -> str:
    """A program of bash, as a stand-in for another one of its name; returns the path as text."""
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


class Terminal:
    """Runs ``bash -i``. :meth:`hang_up` is what the end of an SSH connection does."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._screen, keyboard = pty.openpty()
        self._printed = b""
        self._read_to = 0
        self._shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "--noediting", "-i"],
            stdin=keyboard,
            stdout=keyboard,
            stderr=keyboard,
            cwd=folder,
            env={**os.environ, "PS1": "", "TERM": "dumb", **(environment or {})},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(keyboard)

    @property
    def pid(self) -> int:
        return self._shell.pid

    @property
    def printed(self) -> str:
        self._read(0.0)
        return self._printed.decode(errors="replace")

    def command(self, words: Sequence[str], *, then: str = "") -> None:
        """``then`` is added as it is: ``&``, or a pipe."""
        self.press(f"{shlex.join(words)} {then}\n")

    def press(self, keys: str) -> None:
        data = keys.encode()
        while data:
            data = data[os.write(self._screen, data) :]

    def wait_for(self, text: str, timeout_s: float) -> None:
        """``text`` must be new since the last call. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while (index := self._printed.find(text.encode(), self._read_to)) < 0:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the terminal did not show {text!r} within {timeout_s:g} s, but {self.printed[-2000:]!r}")
            self._read(0.1)
        self._read_to = index + len(text)

    def hang_up(self) -> None:
        if self._screen >= 0:
            os.close(self._screen)
            self._screen = -1

    def close(self) -> None:
        """Ends the shell; its jobs get SIGHUP."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._shell.wait(5)
        self._shell.kill()
        self._shell.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _read(self, timeout_s: float) -> None:
        while self._screen >= 0 and select.select([self._screen], [], [], timeout_s)[0]:
            try:
                self._printed += os.read(self._screen, 1 << 16)
            except OSError:  # the shell has ended
                time.sleep(timeout_s)
                return
            timeout_s = 0.0


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):  # nohup, or a script's &, may have started this process
        signal.signal(number, signal.SIG_DFL)
