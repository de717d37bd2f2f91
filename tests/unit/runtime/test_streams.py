"""Programs whose standard streams are closed, whose reader ends, or whose terminal goes away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tepo_megatron.tools.faults.processes import wait_until
from tests.support.programs import TIMEOUT_S
from tests.support.shell import Terminal

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


def test_work_is_done_when_its_terminal_goes_away(tmp_path: Path) -> None:
    with Terminal(tmp_path) as terminal:
        (tmp_path / "work.py").write_text(WORK)
        terminal.press("trap '' HUP\n")  # nohup would take the terminal away at once
        terminal.command([sys.executable, "work.py", str(tmp_path), "gone"])
        terminal.wait_for("started", TIMEOUT_S)
        terminal.hang_up()
        (tmp_path / "gone").touch()
        wait_until((tmp_path / "done").exists, TIMEOUT_S, "the work")
