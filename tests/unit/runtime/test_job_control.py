"""Ctrl-Z, ``fg``, ``bg`` and a kill of a job that is stopped: a real shell on a real terminal, and processes without torch."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tepo_megatron.runtime.proc import STOPPED, Process
from tepo_megatron.tools.faults.processes import descendants, wait_until
from tests.support.programs import TIMEOUT_S
from tests.support.shell import CTRL_Z, Terminal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

JOB = """
import subprocess, sys, time
from tepo_megatron.runtime.job_control import stopped_together

WAITS = "import time; time.sleep(1000)"
CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAITS!r}], start_new_session=True).wait()"

with stopped_together(lambda: print("stopping", flush=True)):
    child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
    print("started", flush=True)
    try:
        child.wait()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    with Terminal(tmp_path) as shell:
        (tmp_path / "job.py").write_text(JOB)
        shell.command([sys.executable, "job.py"])
        shell.wait_for("started", TIMEOUT_S)
        yield shell


@pytest.fixture
def job(terminal: Terminal) -> Iterator[list[int]]:
    """The PIDs of the job, its child and its grandchild."""
    (first,) = Process.children(terminal.pid)
    wait_until(lambda: len(descendants(first.pid)) == 3, TIMEOUT_S, "three processes")
    pids = descendants(first.pid)
    yield pids
    for pid in pids:
        if Process.start_time(pid):
            os.kill(pid, signal.SIGKILL)


def wait_stopped(pids: list[int], *, stopped: bool = True) -> None:
    def reached() -> bool:
        states = [Process.read(pid) for pid in pids]
        return all((state is not None and state.state == STOPPED) == stopped for state in states)

    wait_until(reached, TIMEOUT_S, f"the state of {pids}")


@pytest.mark.parametrize("command", ["fg", "bg"])
def test_ctrl_z_stops_every_process_and_the_shell_continues_them(terminal: Terminal, job: list[int], command: str) -> None:
    for _ in range(2):
        terminal.press(CTRL_Z)
        wait_stopped(job)
        terminal.wait_for("Stopped", TIMEOUT_S)
        terminal.press("fg\n")
        wait_stopped(job, stopped=False)
    terminal.press(CTRL_Z)
    terminal.wait_for("Stopped", TIMEOUT_S)
    terminal.press(f"{command}\n")
    wait_stopped(job, stopped=False)
    os.kill(job[0], signal.SIGINT)
    terminal.wait_for("interrupted", TIMEOUT_S)


def test_two_ctrl_z_stop_the_job_once_and_if_it_is_killed_the_others_continue(terminal: Terminal, job: list[int]) -> None:
    for number in range(2):
        os.kill(job[0], signal.SIGTSTP)
        os.kill(job[0], signal.SIGTSTP)
        wait_stopped(job)
        terminal.wait_for("Stopped", TIMEOUT_S)
        if number == 0:
            terminal.press("fg\n")
            wait_stopped(job, stopped=False)
    os.kill(job[0], signal.SIGKILL)
    wait_stopped(job[1:], stopped=False)
    assert all(Process.start_time(pid) for pid in job[1:])
