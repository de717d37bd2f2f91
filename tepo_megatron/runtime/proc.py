"""Processes of this machine, read from Linux's /proc. Other systems have no results."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")

STOPPED = "T"  # by a signal; under a debugger it is "t"


@dataclass(frozen=True)
class ProcessState:
    """``state`` is the kernel's letter (proc(5)). ``started``, in clock ticks since boot, makes the PID unique."""

    pid: int
    parent: int
    group: int
    state: str
    started: int
    threads: int = 1
    cpu_s: float = 0.0
    uid: int = 0

    @property
    def alive(self) -> bool:
        return self.state not in ("Z", "X")


def process_state(pid: int, proc: Path = PROC) -> ProcessState | None:
    folder = proc / str(pid)
    try:
        # The name in parentheses may contain anything, parentheses and spaces too; the fields after the last one are fixed.
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        uid = folder.stat().st_uid
    except OSError:
        return None
    if not fields:
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return ProcessState(pid, int(fields[1]), int(fields[2]), fields[0], int(fields[19]), int(fields[17]), cpu_s, uid)


def processes(proc: Path = PROC) -> Iterator[ProcessState]:
    """Sees this container only."""
    for entry in os.listdir(proc) if proc.is_dir() else ():
        if entry.isdigit() and (state := process_state(int(entry), proc)):
            yield state


def descendants(pid: int) -> list[ProcessState]:
    """Parents come first."""
    states = list(processes())
    result: list[ProcessState] = []
    parents = {pid}
    while below := [state for state in states if state.parent in parents]:
        result += below
        parents = {state.pid for state in below}
    return result


def children(pid: int) -> list[ProcessState]:
    """Reads every process of the machine if the kernel keeps no lists of children."""
    lists = list((PROC / str(pid) / "task").glob("*/children"))
    if not lists:
        return [state for state in descendants(pid) if state.parent == pid]
    pids: list[int] = []
    for path in lists:
        with suppress(OSError):  # the thread has ended
            pids += map(int, path.read_text().split())
    return [state for child in pids if (state := process_state(child))]


def group_members(group: int) -> list[int]:
    return [state.pid for state in processes() if state.group == group and state.alive]


def start_time(pid: int) -> int:
    """Returns 0 if the process has ended."""
    state = process_state(pid)
    return state.started if state is not None and state.alive else 0


def command_line(pid: int) -> str:
    with suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def environment(pid: int) -> dict[str, str]:
    """Returns the variables at the process's start."""
    with suppress(OSError):
        entries = (PROC / str(pid) / "environ").read_bytes().decode(errors="surrogateescape").split("\0")
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)
    return {}


def wait_channel(pid: int) -> str:
    """Returns the kernel function in which the process sleeps."""
    with suppress(OSError):
        return (PROC / str(pid) / "wchan").read_text().strip("0")
    return ""


def boot_id() -> str:
    """All containers share it; without /proc it is the host name."""
    with suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()
