"""What vLLM does otherwise on CPUs, in servers whose workers have one core each: its processes are forks, and do not spin.

Importing torch and vLLM costs a process five CPU seconds, and a server has three or more. vLLM forks by default where it is
used as a library; its CPU platform spawns for one reason: OpenMP reads once in a process how many threads there are, and where.
A worker on one core has one thread, and takes its place itself (``bound_worker``): docs/decisions/020-forked-servers.md.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import socket
import stat

from tepo_megatron.versions import VLLM_RANGE, in_range

FORK_VARIABLE = "TEPO_SERVER_FORKS"
"""Environment: set where a server's processes are to be forks of its first one."""

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def fork_processes() -> None:
    """From here on vLLM forks the processes that it starts from this one. Nothing happens on GPUs, nor in another version of
    vLLM than ours, which then spawns as it would.

    Called before vLLM makes its config.
    """
    import vllm
    from vllm import envs
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or not in_range(vllm.__version__, VLLM_RANGE):
        return
    # vLLM's table of variables, which it asks at each use: its platform writes the variable itself whenever it sees a config.
    envs.environment_variables[_METHOD] = lambda: "fork"
    os.register_at_fork(after_in_child=leave_parent)
    # A worker would look for its next message for a second after the last one, on a core that the trainer has use for.
    SpinCondition.__init__ = functools.partialmethod(SpinCondition.__init__, busy_loop_s=0.0)


def resume_collector() -> None:
    """Has the garbage collector work from now on, if it was stopped (``start``), and leave alone what is there now."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def take_core(cores: str, worker: int) -> None:
    """Has the calling thread, and those that it starts from now on, run on worker ``worker``'s core of ``cores`` (``0|1``).

    Raises ValueError where this process may not run there.
    """
    core = int(cores.split("|")[worker])
    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:
        raise ValueError(
            f"worker {worker} of this server cannot run on core {core}: there is none, or it is kept from this job; set "
            "rollout.server.cpu_threads to cores that it has, or to auto"
        ) from error


def leave_parent() -> None:
    """In a fork: its signals are no longer those of the server's event loop, and the server's port is not kept open by it."""
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
