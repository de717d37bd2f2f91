"""Names of temporary folders say which process made them, so that what a killed one has left can be found and removed.

``runtime/leftovers.py`` removes them. Without Linux's /proc there is nothing to tell whether a process still runs.
"""

from __future__ import annotations

import os
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

PREFIX = "tepo"
PROC = Path("/proc")


def folder_name() -> str:
    """The beginning of the name of a folder of this process: ``tepo-PLACE-PID-STARTED``."""
    pid = os.getpid()
    return f"{PREFIX}-{place()}-{pid}-{started(pid)}"


def started(pid: int) -> int:
    """When a process started, in the kernel's ticks since boot; 0 if there is none, or the system does not tell."""
    with suppress(OSError):
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[19]) if fields[0] not in "ZX" else 0
    return 0


def place() -> str:
    """Names the boot and the numbering of processes (container) in which a process' number means something."""
    parts = [os.uname().nodename]
    with suppress(OSError):
        parts.append((PROC / "sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink(PROC / "self/ns/pid"))
    return blake2b("/".join(parts).encode(), digest_size=3).hexdigest()
