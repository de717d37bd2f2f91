"""What a server takes of a machine: a port, cores for its workers, GPUs."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from contextlib import suppress

from tepo_megatron.config.rollout_server import ServerConfig
from tepo_megatron.runtime.cores import available_cores
from tepo_megatron.sampler.vllm.wire.cores import read_cores


def reserve_port(host: str, first: int = 0, taken: Collection[int] = ()) -> socket.socket:
    """A socket on the first port from ``first`` on that nothing listens on and that is not in ``taken``; ``first`` = 0: any.

    While it is open no other process is given its port: a server takes seconds to come to its own socket, and a trainer that
    builds process groups meanwhile is given hundreds. Who asks for just this port, with SO_REUSEADDR, gets it all the same.
    Raises RuntimeError if the host's name cannot be resolved or no port up to 65535 is free.
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
    """The port that :func:`reserve_port` finds, without a hold on it."""
    with reserve_port(host, first, taken) as held:
        return int(held.getsockname()[1])


def bind_cores(servers: int, tp: int, available: Sequence[int] | None = None, *, whole: bool = False) -> list[str]:
    """One core for each of the ``tp`` workers of each server, spread over the cores that this process may use; ``whole``: equal
    parts of all of them.

    Returns ``VLLM_CPU_OMP_THREADS_BIND`` of each server, such as ``"0|1"`` or ``"0,1|2,3"``. With more workers than cores they
    share.
    """
    cores = list(available_cores() if available is None else available)
    workers = servers * tp
    step = max(1, len(cores) // workers)
    parts = [[cores[(worker * step + at) % len(cores)] for at in range(step if whole else 1)] for worker in range(workers)]
    bound = [",".join(map(str, part)) for part in parts]
    return ["|".join(bound[first : first + tp]) for first in range(0, workers, tp)]


def worker_cores(config: ServerConfig, servers: int) -> list[str]:
    """``VLLM_CPU_OMP_THREADS_BIND`` of each of a machine's servers: by :func:`bind_cores` where the config says ``auto`` or
    ``all``, else as it says.
    """
    if config.cpu_threads in ("auto", "all"):
        return bind_cores(servers, config.tp, whole=config.cpu_threads == "all")
    return [config.cpu_threads] * servers


def cores_of(bound: Sequence[str], available: Sequence[int]) -> set[int]:
    """The cores that servers have by :func:`worker_cores`; all where vLLM binds nothing (``nobind``)."""
    try:
        return {core for one in bound for worker in read_cores(one) for core in worker}
    except ValueError:
        return set(available)


def visible_gpus(gpus: Sequence[int], own: str | None) -> str:
    """``CUDA_VISIBLE_DEVICES`` of a server on the GPUs that this process, for which the variable is ``own``, numbers so.

    Raises ValueError where it does not see so many.
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
    """The seed of server number ``index``: vLLM takes 32 bits. Requests for samples bring seeds of their own."""
    return (seed + index) % 2**32
