"""What processes of this machine have cost, from Linux's ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path


def family(pid: int) -> dict[int, str]:
    """Process ids of all descendants of a process, with what each calls itself."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (parent := _parent(int(folder.name))) is not None:
            children.setdefault(parent, []).append(int(folder.name))
    found: dict[int, str] = {}
    left = [pid]
    while left:
        for child in children.get(left.pop(), []):
            found[child] = _command(child)
            left.append(child)
    return found


def cpu_seconds(pid: int) -> float:
    """What a process has spent in all its threads, in user and system mode; 0 if it is gone."""
    fields = _stat(pid)
    return 0.0 if fields is None else (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def _stat(pid: int) -> list[str] | None:
    """The fields of ``/proc/PID/stat`` behind the name, which may have blanks: state, parent, …"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
