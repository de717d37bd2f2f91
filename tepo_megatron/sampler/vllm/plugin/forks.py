"""Forked vLLM processes on CPUs, which saves each five CPU seconds of imports: docs/decisions/020-forked-servers.md.

OpenMP reads its threads once in a process: the first process has one, and a worker takes its cores itself (``bound_worker``).
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import stat

from tepo_megatron.runtime.cores import read_cores
from tepo_megatron.versions import VLLM_RANGE, in_range

FORK_VARIABLE = "TEPO_SERVER_FORKS"

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def fork_processes() -> None:
    """Call it before vLLM makes its config. Does nothing on GPUs, nor in another version of vLLM than ours."""
    import vllm
    from vllm import envs
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or not in_range(vllm.__version__, VLLM_RANGE):
        return
    # vLLM's table of variables, which it asks at each use: its platform writes the variable itself whenever it sees a config.
    envs.environment_variables[_METHOD] = lambda: "fork"
    os.register_at_fork(after_in_child=leave_parent)


def resume_collector() -> None:
    """Starts the garbage collector if ``start`` stopped it; it ignores all present objects."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def take_cores(cores: str, worker: int) -> int:
    """Binds the calling thread and its later ones to worker ``worker``'s part of ``cores`` (``0|1``); returns the number of
    cores.

    Raises ValueError if this process may not run there.
    """
    own = set(read_cores(cores)[worker])
    try:
        os.sched_setaffinity(0, own)
        taken = os.sched_getaffinity(0)
    except OSError:
        taken = set()
    if taken != own:  # the kernel accepts a list with missing cores
        missing = ", ".join(map(str, sorted(own - taken)))
        raise ValueError(
            f"worker {worker} of this server cannot run on core {missing}: there is none, or it is kept from this job; set "
            "rollout.server.cpu_threads to cores that it has, or to auto"
        )
    return len(own)


def leave_parent() -> None:
    """In a fork: detaches from the signals of the server's event loop, and closes the copies of its sockets."""
    signal.set_wakeup_fd(-1)
    with open(os.devnull, "rb") as nothing:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if _is_internet_socket(descriptor):
                os.dup2(nothing.fileno(), descriptor)  # keeps the number: the parent's objects would close another's


def _is_internet_socket(descriptor: int) -> bool:
    try:
        copy = os.dup(descriptor)
    except OSError:  # that of the listing, closed by now
        return False
    if not stat.S_ISSOCK(os.fstat(copy).st_mode):
        os.close(copy)
        return False
    with socket.socket(fileno=copy) as inherited:
        return inherited.family in (socket.AF_INET, socket.AF_INET6)
