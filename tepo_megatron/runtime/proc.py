"""This machine's processes, from Linux's /proc; other systems have no results."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")

ENDS_WITH = "TEPO_ENDS_WITH"  # the PID of what started a run, which is asked to stop if that is killed

STOPPED = "T"  # by a signal; under a debugger it is "t"


@dataclass(frozen=True)
class Process:
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

    @classmethod
    def read(cls, pid: int, proc: Path = PROC) -> Process | None:
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
        return cls(pid, int(fields[1]), int(fields[2]), fields[0], int(fields[19]), int(fields[17]), cpu_s, uid)

    @classmethod
    def all(cls, proc: Path = PROC) -> list[Process]:
        """Sees this container only."""
        pids = [int(entry) for entry in os.listdir(proc) if entry.isdigit()] if proc.is_dir() else []
        return [process for pid in pids if (process := cls.read(pid, proc))]

    @classmethod
    def below(cls, pid: int) -> list[Process]:
        """Parents come first."""
        processes = cls.all()
        result: list[Process] = []
        parents = {pid}
        while children := [process for process in processes if process.parent in parents]:
            result += children
            parents = {process.pid for process in children}
        return result

    @classmethod
    def children(cls, pid: int) -> list[Process]:
        """Reads all processes if the kernel keeps no lists of children."""
        lists = list((PROC / str(pid) / "task").glob("*/children"))
        if not lists:
            return [process for process in cls.all() if process.parent == pid]
        pids: list[int] = []
        for path in lists:
            with suppress(OSError):  # the thread has ended
                pids += map(int, path.read_text().split())
        return [process for child in pids if (process := cls.read(child))]

    @classmethod
    def in_group(cls, group: int) -> list[int]:
        return [process.pid for process in cls.all() if process.group == group and process.alive]

    @classmethod
    def start_time(cls, pid: int) -> int:
        """Returns 0 for an ended process."""
        process = cls.read(pid)
        return process.started if process is not None and process.alive else 0

    @staticmethod
    def command_line(pid: int) -> str:
        return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")

    @staticmethod
    def output_path(pid: int) -> str:
        """Returns where its standard output goes, or ""."""
        with suppress(OSError):
            return os.readlink(PROC / str(pid) / "fd/1")
        return ""

    @staticmethod
    def environment(pid: int) -> dict[str, str]:
        entries = _read(pid, "environ").decode(errors="surrogateescape").split("\0")
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)

    @staticmethod
    def end_with(parent: int) -> None:
        """This process gets SIGTERM when its ``parent`` ends, or now if it has ended; Linux only."""
        if sys.platform == "linux":
            pr_set_pdeathsig = 1
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)

    @classmethod
    def end_with_starter(cls) -> None:
        if starter := os.environ.pop(ENDS_WITH, None):  # processes below do not inherit it
            cls.end_with(int(starter))

    @staticmethod
    def wait_channel(pid: int) -> str:
        return _read(pid, "wchan").decode().strip("0")


def _read(pid: int, name: str) -> bytes:
    with suppress(OSError):
        return (PROC / str(pid) / name).read_bytes()
    return b""


def boot_id() -> str:
    """Containers share it; without /proc it is the host name."""
    with suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def visible_gpus(numbers: Sequence[int], what: str) -> str:
    """Returns another process's CUDA_VISIBLE_DEVICES. ``numbers`` count this process's GPUs. Raises ValueError for too few."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(max(numbers) + 1)))
    if max(numbers) >= len(names):
        raise ValueError(
            f"{what} should run on GPU {max(numbers)}, but CUDA_VISIBLE_DEVICES = {visible} shows {len(names)}; show more, or "
            "lower engine.parallel, rollout.server.tp or count"
        )
    return ",".join(names[number] for number in numbers)
