"""Ctrl-Z for processes in several sessions; the terminal stops only the first."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from tepo_megatron.runtime.preemption import handled_by, not_ignored
from tepo_megatron.runtime.proc import PROC, STOPPED, Process
from tepo_megatron.runtime.text import echo


@contextmanager
def stopped_together(before_stop: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Ctrl-Z (SIGTSTP) stops every process below this one, then this one; when it continues or dies, the others continue. Does
    nothing outside the main thread, without Linux's /proc, and if SIGTSTP is ignored.
    """
    if not PROC.exists() or not not_ignored([signal.SIGTSTP]):
        yield
        return

    is_stopping = is_pressed_again = False

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        nonlocal is_stopping, is_pressed_again
        if is_stopping:
            is_pressed_again = True
            return
        is_stopping = is_pressed_again = True
        while is_pressed_again:
            before_stop()
            try:
                with _stopped_descendants():
                    is_pressed_again = False  # before the job stops, a second Ctrl-Z changes nothing
                    signal.signal(number, signal.SIG_DFL)
                    signal.pthread_kill(threading.get_ident(), number)  # returns when this process continues
                    signal.signal(number, stop)
            except OSError as error:
                echo(f"Ctrl-Z stops nothing: the process that would continue the others failed ({error})", err=True)
                break
        is_stopping = False

    with handled_by(stop, [signal.SIGTSTP]):
        yield


@contextmanager
def _stopped_descendants() -> Iterator[None]:
    """Another process, which starts first and reads each PID before the process stops, continues them if this one is killed."""
    command = ["/bin/sh", "-c", 'while read -r pid; do set -- "$@" "$pid"; done; kill -CONT "$@"']
    quiet = subprocess.DEVNULL
    helper = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)
    assert helper.stdin is not None
    try:
        known = {helper.pid}
        # Parents come first: stopped, they start no further process.
        while running := [
            state.pid
            for state in Process.below(os.getpid())
            if state.alive and state.state != STOPPED and state.pid not in known
        ]:
            helper.stdin.write("".join(f"{pid}\n" for pid in running).encode())
            for pid in running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            known.update(running)
        yield
    finally:
        helper.stdin.close()
        helper.wait()
