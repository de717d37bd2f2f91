import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tepo_megatron.runtime.proc import Process

SHM = Path("/dev/shm")  # noqa: S108
_UNLIMITED = 2**62


@dataclass(frozen=True)
class Machine:
    """Sizes are in bytes; ``address_space`` is one process's."""

    gpus: int = 0
    has_nccl: bool = False
    local_ranks: int = 1
    ranks: int = 1
    open_files: int = _UNLIMITED
    processes: int = _UNLIMITED
    memory: int = _UNLIMITED
    address_space: int = _UNLIMITED
    shared_memory: int = _UNLIMITED

    @staticmethod
    def raise_open_files() -> None:
        # The soft limit is often 1,024: too few for connections to many servers, and for gloo's between many ranks.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            with suppress(ValueError, OSError):  # macOS says "unlimited" and means less
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def this_machine(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Machine:
    """Unknown resources count as unlimited."""
    import torch
    from torch import distributed

    groups = list(_groups(proc, cgroups))
    free = [1024 * kib for kib in _numbers(proc / "meminfo", "MemAvailable:")]
    ranks = variable("WORLD_SIZE", 1)
    return Machine(
        gpus=torch.cuda.device_count(),
        has_nccl=distributed.is_nccl_available(),
        local_ranks=variable("LOCAL_WORLD_SIZE", ranks),
        ranks=ranks,
        open_files=_limit(resource.RLIMIT_NOFILE, hard=True),
        processes=min([_UNLIMITED, *_threads_left(proc), *(left for group in groups for left in _left(group, "pids"))]),
        memory=min([_UNLIMITED, *free, *(left for group in groups for left in _left(group, "memory"))]),
        address_space=min(_limit(resource.RLIMIT_AS), _limit(resource.RLIMIT_DATA)),
        shared_memory=_free_shared_memory(),
    )


def is_root() -> bool:
    return variable("RANK", 0) == 0


def variable(name: str, default: int) -> int:
    """Reads a whole number of the environment. Raises ValueError for something else."""
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ValueError(
            f"the environment variable {name} = {text[:60]!r} is no whole number; unset it, or let torchrun set it"
        )
    return int(text)


@contextmanager
def changed_environment(**changes: str | None) -> Iterator[None]:
    """None removes a variable."""
    before = dict(os.environ)
    try:
        for name, value in changes.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def available_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def read_cores(cores: str) -> list[list[int]]:
    """Returns each worker's cores from ``VLLM_CPU_OMP_THREADS_BIND``, such as ``0|1`` or ``0-3|4-7``."""
    return [[core for part in worker.split(",") for core in _read_range(part)] for worker in cores.split("|")]


def _read_range(part: str) -> range:
    first, dash, last = part.partition("-")
    cores = range(int(first), int(last if dash else first) + 1)
    if not cores:
        raise ValueError(f"{part!r} is no range of cores")
    return cores


def _limit(which: int, *, hard: bool = False) -> int:
    value = resource.getrlimit(which)[1 if hard else 0]
    return _UNLIMITED if value == resource.RLIM_INFINITY else value


def _free_shared_memory() -> int:
    with suppress(OSError):
        disk = os.statvfs(SHM)
        return disk.f_bavail * disk.f_frsize
    return _UNLIMITED


def _numbers(file: Path, *names: str) -> Iterator[int]:
    with suppress(OSError):
        for words in map(str.split, file.read_text().splitlines()):
            if len(words) > 1 and words[0] in names:
                yield int(words[1])


def _threads_left(proc: Path) -> Iterator[int]:
    limit = _limit(resource.RLIMIT_NPROC)
    if limit < _UNLIMITED and os.geteuid() != 0:
        yield max(0, limit - sum(state.threads for state in Process.all(proc) if state.uid == os.geteuid()))


def _groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            names = [name for name in controllers.split(",") if name in ("memory", "pids")]
            for root in [cgroups / name for name in names] if controllers else [cgroups]:
                folder = root / path.lstrip("/")
                yield from (inner for inner in (folder, *folder.parents) if inner == root or root in inner.parents)


def _left(group: Path, controller: str) -> Iterator[int]:
    """Memory of cached files counts as free."""
    pairs = {
        "memory": (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")),
        "pids": (("pids.max", "pids.current"),),
    }
    for limit, usage in pairs[controller]:
        with suppress(OSError, ValueError):  # no such file, or "max"
            left = int((group / limit).read_text()) - int((group / usage).read_text())
            cached = _numbers(group / "memory.stat", "inactive_file", "total_inactive_file") if controller == "memory" else ()
            yield max(0, left + next(iter(cached), 0))
