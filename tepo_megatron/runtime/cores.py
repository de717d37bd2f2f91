"""The CPU cores of this process."""

from __future__ import annotations

import os


def available_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def load_hint() -> str:
    load, cores = os.getloadavg()[0], len(available_cores())
    return "" if load <= 2 * cores else f" This machine's load is {load:.0f} on {cores} cores: end other work, or allow more."


def read_cores(cores: str) -> list[list[int]]:
    """Returns each worker's cores from ``VLLM_CPU_OMP_THREADS_BIND``, such as ``0|1``, ``0,1`` or ``0-3|4-7``; raises
    ValueError for others."""
    return [[core for part in worker.split(",") for core in _read_range(part)] for worker in cores.split("|")]


def _read_range(part: str) -> range:
    first, dash, last = part.partition("-")
    found = range(int(first), int(last if dash else first) + 1)
    if not found:
        raise ValueError(f"{part!r} is no range of cores")
    return found
