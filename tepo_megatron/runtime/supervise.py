"""``python -m tepo_megatron.runtime.supervise -- COMMAND...``: runs a command that must not outlive its starter.

When standard input, a pipe from the starter, closes, or on SIGTERM, the process group gets SIGTERM, the command first, then
SIGKILL. When the command ends by itself, the rest of its group is killed. Then its temporary folder and shared memory are
removed. The supervisor must lead its process group (``start_new_session=True``).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from tepo_megatron.runtime.leftovers import Scratch, sweep
from tepo_megatron.runtime.proc import group_members

GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL."""

POLL_S = 0.1

REST_S = 2.0


def main(arguments: list[str]) -> int:
    """Runs the command; returns when the whole process group has ended."""
    if len(arguments) < 2 or arguments[0] != "--":
        raise SystemExit("usage: python -m tepo_megatron.runtime.supervise -- COMMAND...")
    if os.getpgrp() != os.getpid():
        raise SystemExit("the supervisor must lead its own process group; start it with start_new_session=True")
    asked_to_stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: asked_to_stop.append(number))  # a handler is not inherited by the command
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm warns all processes of a step; the trainer acts on it. Inherited
    starter = os.getppid()
    sweep()
    scratch = Scratch()
    child = subprocess.Popen(
        arguments[1:],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **scratch.environment()},
        preexec_fn=_end_with_supervisor(),  # this process has one thread
    )
    # A forked relative of the starter may hold the pipe open after the starter's death: its parent id tells that too.
    while child.poll() is None and not asked_to_stop and os.getppid() == starter and not _closed(sys.stdin.fileno()):
        scratch.record()
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
        os.killpg(0, signal.SIGTERM)
    else:
        print(f"supervisor: the server ended by itself with exit code {child.returncode}", file=sys.stderr, flush=True)  # noqa: T201
    deadline = time.monotonic() + REST_S
    while _others() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    _kill_others()
    scratch.remove()
    os.killpg(0, signal.SIGKILL)  # this process as well, and all others where there is no /proc
    time.sleep(1)
    return 1


def _end_with_supervisor() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    kernel, pr_set_pdeathsig, supervisor = ctypes.CDLL(None), 1, os.getpid()

    def ask_the_kernel() -> None:
        kernel.prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != supervisor:  # it was killed just before
            os.kill(os.getpid(), signal.SIGTERM)

    return ask_the_kernel


def _others() -> list[int]:
    return [pid for pid in group_members(os.getpid()) if pid != os.getpid()]


def _kill_others() -> None:
    """A process that the kernel cannot end yet is not waited for beyond REST_S."""
    deadline = time.monotonic() + REST_S
    while (left := _others()) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S / 10)


def _closed(fd: int) -> bool:
    readable, _, _ = select.select([fd], [], [], POLL_S)
    return bool(readable) and os.read(fd, 1) == b""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
