"""The CPU cores of this process."""

from __future__ import annotations

import os


def available_cores() -> list[int]:
    """The cores that this process may use, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def load_hint() -> str:
    """For a message about something that took too long: how much runs on this machine. Empty if its cores suffice."""
    load, cores = os.getloadavg()[0], len(available_cores())
    return "" if load <= 2 * cores else f" This machine's load is {load:.0f} on {cores} cores: end other work, or allow more."
