"""Programs on a terminal: Ctrl-Z, a kill of a job that is stopped, streams that are closed, and readers that go away."""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from tepo_megatron.runtime.job_control import stopped_together
from tepo_megatron.runtime.proc import STOPPED, Process
from tepo_megatron.tools.faults.processes import CTRL_Z, Terminal, descendants, wait_until
from tests.support.programs import TIMEOUT_S

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

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
        shell.press(shlex.join([sys.executable, "job.py"]) + "\n")
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


@on_linux
def test_ctrl_z_stops_every_process_and_the_shell_continues_them(terminal: Terminal, job: list[int]) -> None:
    for _ in range(2):
        terminal.press(CTRL_Z)
        wait_stopped(job)
        terminal.wait_for("Stopped", TIMEOUT_S)
        terminal.press("fg\n")
        wait_stopped(job, stopped=False)
    terminal.press(CTRL_Z)
    terminal.wait_for("Stopped", TIMEOUT_S)
    terminal.press("bg\n")
    wait_stopped(job, stopped=False)
    os.kill(job[0], signal.SIGINT)
    terminal.wait_for("interrupted", TIMEOUT_S)


@on_linux
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


@on_linux
def test_ctrl_z_stops_nothing_if_nobody_could_continue_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table of processes is full."""
    child = subprocess.Popen(["sleep", "1000"])
    monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=BlockingIOError(errno.EAGAIN, "no more processes")))
    try:
        with stopped_together():
            for _ in range(2):
                signal.raise_signal(signal.SIGTSTP)
        state = Process.read(child.pid)
        assert state is not None
        assert state.state != STOPPED
    finally:
        child.kill()
        child.wait()
    assert capsys.readouterr().err.count("Ctrl-Z stops nothing: ") == 2


WORK = """
import os, subprocess, sys, time
from pathlib import Path
from tepo_megatron.runtime.text import open_closed_streams, outlive_readers

open_closed_streams()
outlive_readers()
folder = Path(sys.argv[1])
with open(folder / "metrics", "w") as metrics:
    print("started", flush=True)
    while len(sys.argv) > 2 and not (folder / sys.argv[2]).exists():
        time.sleep(0.01)
    for _ in range(100):
        print("a line of many " * 100, flush=True)
        print("an error", file=sys.stderr)
        sys.stdout.isatty()
    subprocess.run([sys.executable, "-c", "import sys; print('a line of a child')"], stderr=subprocess.DEVNULL)
    metrics.write("the work")
(folder / "done").write_text((folder / "metrics").read_text())
"""
ENDINGS = {
    "no output": '"$@" >&-',
    "no errors": '"$@" 2>&-',
    "no streams": '"$@" <&- >&- 2>&-',
    "a reader that ends": '"$@" 2>&1 | head -1; (exit ${PIPESTATUS[0]})',
    "a full disk": '"$@" > /dev/full 2>&1',
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("flags", [[], ["-u"]])
def test_work_is_done_whatever_becomes_of_its_output(tmp_path: Path, ending: str, flags: list[str]) -> None:
    """``-u``: as torchrun's agent starts ranks."""
    command = ["bash", "-c", ENDINGS[ending], "bash", sys.executable, *flags, "-c", WORK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").read_text() == "the work"  # and no line of another process


@pytest.mark.parametrize(
    ("command", "ending"),
    [*(("samples", ending) for ending in ('"$@" >&-', '"$@" 2>&-', '"$@" | head -1', '"$@" | true')), ("report", '"$@" >&-')],
)
def test_commands_that_nobody_reads_have_no_traceback(tmp_path: Path, command: str, ending: str) -> None:
    sample = {"problem": "p", "prompt": "q" * 200, "answer": "a", "greedy": {"response": "r", "reward": 1.0, "tokens": 3}}
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps({"step": 1, **sample}) + "\n" for _ in range(2000)))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
    words = ["bash", "-c", ending, "bash", sys.executable, "-m", "tepo_megatron", command, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.stderr == ""
    assert command != "report" or (tmp_path / "report.html").exists()


def test_work_is_done_when_its_terminal_goes_away(tmp_path: Path) -> None:
    with Terminal(tmp_path) as terminal:
        (tmp_path / "work.py").write_text(WORK)
        terminal.press("trap '' HUP\n")  # nohup would take the terminal away at once
        terminal.press(shlex.join([sys.executable, "work.py", str(tmp_path), "gone"]) + "\n")
        terminal.wait_for("started", TIMEOUT_S)
        terminal.hang_up()
        (tmp_path / "gone").touch()
        wait_until((tmp_path / "done").exists, TIMEOUT_S, "the work")
