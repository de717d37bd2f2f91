"""Ports, cores, GPUs and memory for servers."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tepo_megatron.config.rollout_server import ServerConfig
from tepo_megatron.runtime.cores import available_cores, read_cores
from tepo_megatron.runtime.proc import processes


def reserve_port(host: str, first: int = 0, taken: Collection[int] = ()) -> socket.socket:
    """A socket on the first free port from ``first`` (0: any) on that is not in ``taken``.

    It keeps other processes off the port until the server, with SO_REUSEADDR, takes it. Raises RuntimeError if the host cannot
    be resolved or no port is free.
    """
    family, _, _, _, address = _resolve(host)
    for port in range(first, 65536) if first else [0] * 100:
        held = socket.socket(family, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            held.bind((address[0], port))
            if held.getsockname()[1] not in taken:
                return held
        held.close()
    raise RuntimeError(f"no free port from {first} on at {host}; set rollout.server.port to another one, or 0 for any")


def free_port(host: str, first: int = 0, taken: Collection[int] = ()) -> int:
    """As :func:`reserve_port`, without the reservation."""
    with reserve_port(host, first, taken) as held:
        return int(held.getsockname()[1])


def bind_cores(servers: int, tp: int, available: Sequence[int] | None = None, *, whole: bool = False) -> list[str]:
    """``VLLM_CPU_OMP_THREADS_BIND`` of each server, such as ``"0,1|2,3"``: a core for each worker, or with ``whole`` equal
    parts of all. More workers than cores share.
    """
    cores = list(available_cores() if available is None else available)
    workers = servers * tp
    step = max(1, len(cores) // workers)
    parts = [[cores[(worker * step + at) % len(cores)] for at in range(step if whole else 1)] for worker in range(workers)]
    bound = [",".join(map(str, part)) for part in parts]
    return ["|".join(bound[first : first + tp]) for first in range(0, workers, tp)]


def worker_cores(config: ServerConfig, servers: int) -> list[str]:
    """``VLLM_CPU_OMP_THREADS_BIND`` of each server: :func:`bind_cores` for ``auto`` and ``all``, else the config's."""
    if config.cpu_threads in ("auto", "all"):
        return bind_cores(servers, config.tp, whole=config.cpu_threads == "all")
    return [config.cpu_threads] * servers


def cores_of(bound: Sequence[str], available: Sequence[int]) -> set[int]:
    """All cores if vLLM binds nothing (``nobind``)."""
    try:
        return {core for one in bound for worker in read_cores(one) for core in worker}
    except ValueError:
        return set(available)


def visible_gpus(gpus: Sequence[int], own: str | None) -> str:
    """``CUDA_VISIBLE_DEVICES`` of a server on the GPUs with these indices in ``own``, this process' value. Raises ValueError if
    there are fewer.
    """
    if not own:
        return ",".join(map(str, gpus))
    names = own.split(",")
    if max(gpus) >= len(names):
        raise ValueError(
            f"a rollout server should run on GPU {max(gpus)}, but CUDA_VISIBLE_DEVICES = {own} shows {len(names)}; show more, "
            "or lower rollout.server.tp or count"
        )
    return ",".join(names[gpu] for gpu in gpus)


def _resolve(host: str) -> tuple[int, int, int, str, tuple[str | int, ...]]:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]  # type: ignore[return-value]
    except OSError as error:
        raise RuntimeError(f"rollout.server.host = {host!r} cannot be resolved: {error}") from error


def server_seed(seed: int, index: int) -> int:
    """The seed of server number ``index``, within vLLM's 32 bits."""
    return (seed + index) % 2**32


GIB = 2**30
MIB = 2**20

SHM = Path("/dev/shm")  # noqa: S108
_UNLIMITED = 2**62

SERVER_FILES, WORKER_FILES = 80, 10
"""Open files of the process with the most, without connections."""

OWN_FILES = 200
"""Open files of the trainer's rank 0, and of a server, besides their connections to each other."""

SERVER_THREADS, WORKER_THREADS = 20, 25
"""Threads of a server's own processes together, and of each worker."""

SERVER_MEMORY, WORKER_MEMORY = GIB, GIB // 2
"""Resident bytes, besides the weights."""

ADDRESS_SPACE = 2 * GIB
"""Bytes of the largest process, besides its cache; torch maps much that it never touches."""

SHARED_MEMORY = 240 * MIB
"""Bytes of the largest queue between a server's processes."""


@dataclass(frozen=True)
class Machine:
    """Free resources, the last three in bytes. ``address_space`` is that of one process."""

    open_files: int = _UNLIMITED
    processes: int = _UNLIMITED
    memory: int = _UNLIMITED
    address_space: int = _UNLIMITED
    shared_memory: int = _UNLIMITED


def raise_open_files() -> None:
    """Raises the soft limit of open files to the hard one; servers inherit it. Each sequence in progress needs a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS says "unlimited" and means less; the check sees what is left
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections(config: ServerConfig) -> int:
    """Most open requests to each server: one for each sequence, within the limit of open files."""
    spare = max(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OWN_FILES)
    return max(1, min(config.max_num_seqs, spare // config.count))


def this_machine(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Machine:
    """Free resources of this process and its children; unknown ones count as unlimited."""
    groups = list(_groups(proc, cgroups))
    memory = min([_UNLIMITED, *_available(proc), *(left for group in groups for left in _left(group, "memory"))])
    pids = min([_UNLIMITED, *_threads_left(proc), *(left for group in groups for left in _left(group, "pids"))])
    return Machine(
        open_files=_limit(resource.RLIMIT_NOFILE, hard=True),
        processes=pids,
        memory=memory,
        address_space=min(_limit(resource.RLIMIT_AS), _limit(resource.RLIMIT_DATA)),
        shared_memory=_free_shared_memory(),
    )


def needed(config: ServerConfig, servers: int, *, weights_bytes: int, on_gpu: bool) -> Machine:
    workers = config.tp * servers
    memory = servers * SERVER_MEMORY + workers * WORKER_MEMORY
    return Machine(
        open_files=SERVER_FILES + WORKER_FILES * config.tp,
        processes=servers * SERVER_THREADS + workers * WORKER_THREADS,
        memory=memory if on_gpu else memory + servers * weights_bytes,
        address_space=ADDRESS_SPACE if on_gpu else ADDRESS_SPACE + config.cpu_kv_cache_gib * GIB,
        shared_memory=0 if on_gpu and config.tp == 1 else SHARED_MEMORY,
    )


def check_machine(
    config: ServerConfig, servers: int, *, weights_bytes: int, on_gpu: bool, machine: Machine | None = None
) -> None:
    """Raises ValueError with every shortage. ``machine`` is by default this one; ``weights_bytes`` are one server's."""
    machine = machine or this_machine()
    want = needed(config, servers, weights_bytes=weights_bytes, on_gpu=on_gpu)
    short = [
        f"{what}: {_amount(getattr(want, name), name)} needed, {_amount(getattr(machine, name), name)} found; {do}"
        for name, (what, do) in _REMEDIES.items()
        if getattr(machine, name) < getattr(want, name)
    ]
    if short:
        some = "a rollout server needs" if servers == 1 else f"{servers} rollout servers need"
        raise ValueError(f"{some} more of this machine than is left. " + ". ".join(short))


def weights_bytes(model_dir: Path) -> int:
    return sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))


_REMEDIES = {
    "open_files": ("open files", "raise the hard limit (ulimit -Hn, or LimitNOFILE of the service)"),
    "processes": ("processes and threads", "raise the limit (ulimit -u, or the container's pids limit), or end others"),
    "memory": (
        "memory",
        "free some, raise the job's or container's limit, or lower rollout.server.count or rollout.server.tp",
    ),
    "address_space": ("address space of a process", "lift the limit (ulimit -v unlimited; ulimit -d unlimited)"),
    "shared_memory": (
        "shared memory in /dev/shm",
        "enlarge it (docker run --shm-size=1g, or --ipc=host; mount -o remount,size=1g /dev/shm), or remove what lies there",
    ),
}


def _amount(value: int, name: str) -> str:
    return str(value) if name in ("open_files", "processes") else f"{value / MIB:.0f} MiB"


def _limit(which: int, *, hard: bool = False) -> int:
    value = resource.getrlimit(which)[1 if hard else 0]
    return _UNLIMITED if value == resource.RLIM_INFINITY else value


def _free_shared_memory() -> int:
    try:
        found = os.statvfs(SHM)
    except OSError:
        return _UNLIMITED
    return found.f_bavail * found.f_frsize


def _available(proc: Path) -> Iterator[int]:
    with suppress(OSError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _threads_left(proc: Path) -> Iterator[int]:
    limit = _limit(resource.RLIMIT_NPROC)
    if limit < _UNLIMITED and os.geteuid() != 0:
        yield max(0, limit - sum(state.threads for state in processes(proc) if state.uid == os.geteuid()))


def _groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Of versions 1 and 2, with their parents."""
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            roots = (
                [cgroups / name for name in controllers.split(",") if name in ("memory", "pids")] if controllers else [cgroups]
            )
            for root in roots:
                folder = root / path.lstrip("/")
                yield from (inner for inner in (folder, *folder.parents) if inner == root or root in inner.parents)


def _left(group: Path, controller: str) -> Iterator[int]:
    """What a cgroup's limit leaves. Memory of cached files counts as free."""
    pairs = {
        "memory": (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")),
        "pids": (("pids.max", "pids.current"),),
    }
    for limit, usage in pairs[controller]:
        with suppress(OSError, ValueError):  # no such file, or "max"
            left = int((group / limit).read_text()) - int((group / usage).read_text())
            yield max(0, left + (_cached(group) if controller == "memory" else 0))


def _cached(group: Path) -> int:
    with suppress(OSError):
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0
