"""A worker that is a fork of this process: for a function that only this process has, such as one of a notebook's cells.

The function crosses no pipe and no file, so nothing is pickled. The child has a copy of this process's memory as it is when the
child is made, of its threads only the one that made it, and of its open files none but its pipes and standard error.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from typing import NoReturn

_LOOK_S = 0.005


class ForkedProcess:
    """``main`` runs in a fork of this process, whose standard input and output are pipes from and to here.

    Has of ``subprocess.Popen`` what a ``WorkerProcess`` uses. Safe to make in any thread, as long as ``main`` takes no lock
    that another thread may hold: Python's own are taken care of, those of a C library are not always.
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
        """The exit code, below 0 for a signal's. Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._code is None:
            found, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            if found:
                self._code = os.waitstatus_to_exitcode(status)
            elif deadline is not None and time.monotonic() >= deadline:
                assert timeout is not None
                raise subprocess.TimeoutExpired("a forked worker", timeout)
            else:
                time.sleep(_LOOK_S)
        return self._code

    def kill(self) -> None:
        if self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _run_child(main: Callable[[], None], requests: int, replies: int) -> NoReturn:
    """What the fork does; nothing of the parent's is unwound in it."""
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
    """A pipe that the child kept open would keep alive what ends when it is closed: servers, other workers."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(3, most if most != resource.RLIM_INFINITY else 1 << 20)
