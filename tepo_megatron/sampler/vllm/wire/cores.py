"""How a server's cores are written; stands on nothing of ours, since servers read them too."""

from __future__ import annotations


def read_cores(cores: str) -> list[list[int]]:
    """The cores of each worker by ``VLLM_CPU_OMP_THREADS_BIND``, such as ``0|1``, ``0,1`` or ``0-3|4-7``.

    Raises ValueError for anything else, such as ``nobind``.
    """
    return [[core for part in worker.split(",") for core in _read_range(part)] for worker in cores.split("|")]


def _read_range(part: str) -> range:
    first, dash, last = part.partition("-")
    found = range(int(first), int(last if dash else first) + 1)
    if not found:
        raise ValueError(f"{part!r} is no range of cores")
    return found
