"""What the kernel says of processes of this machine, from /proc. Elsewhere than on Linux it says nothing."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")

STOPPED = "T"
"""The kernel's letter for a process that a signal (SIGSTOP, SIGTSTP) has stopped. One under a debugger has another."""


@dataclass(frozen=True)
class ProcessState:
    """One process. ``letter`` is the kernel's: R runs, S sleeps, D waits for a device, T stopped, t traced, Z ended.
    ``started`` is in clock ticks since the machine's start; with the number it names a process for good.
    """

    pid: int
    parent: int
    letter: str
    started: int
    command: str
    waits_in: str
    """The kernel function in which it sleeps, where the kernel tells."""

    @property
    def alive(self) -> bool:
        return self.letter not in ("Z", "X")


def process_state(pid: int) -> ProcessState | None:
    """The process, or None where there is none (any more)."""
    folder = PROC / str(pid)
    try:
        # The name in brackets may hold anything, also brackets and spaces; what follows the last bracket is fixed.
        fields = (folder / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    command = waits_in = ""
    with contextlib.suppress(OSError):  # it may have ended since, or belong to another user
        command = " ".join((folder / "cmdline").read_bytes().decode(errors="replace").split("\0")).strip()
        waits_in = (folder / "wchan").read_text().strip("0")
    return ProcessState(pid, int(fields[1]), fields[0], int(fields[19]), command, waits_in)


def descendants(pid: int) -> list[ProcessState]:
    """All processes below this one, parents before their children."""
    if not PROC.is_dir():
        return []
    states = [state for entry in os.listdir(PROC) if entry.isdigit() and (state := process_state(int(entry)))]
    found: list[ProcessState] = []
    parents = {pid}
    while below := [state for state in states if state.parent in parents]:
        found += below
        parents = {state.pid for state in below}
    return found


def children(pid: int) -> list[ProcessState]:
    """The processes that this one has started, without looking at every process of the machine where that can be helped."""
    lists = list((PROC / str(pid) / "task").glob("*/children"))
    if not lists:  # a kernel that does not keep them
        return [state for state in descendants(pid) if state.parent == pid]
    pids: list[int] = []
    for path in lists:
        with contextlib.suppress(OSError):  # the thread has ended
            pids += map(int, path.read_text().split())
    return [state for each in pids if (state := process_state(each))]
