"""``CUDA_DEVICE_MAX_CONNECTIONS``: how many queues a process has to its GPU. CUDA reads it once, when it starts. And
``NCCL_SOCKET_IFNAME``, by which NCCL finds the network.

With one queue kernels start in the order in which they were called. Megatron-Core's linears rely on it
(``tensor_parallel/layers.py``): a collective that is called before a matrix product then also starts before it, and hides
behind it. It is a matter of speed alone. Megatron's own training demands it of TP and CP on GPUs before Blackwell, and of no
other.
"""

from __future__ import annotations

import ctypes
import os

from tepo_megatron.config import ParallelConfig

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"

BLACKWELL = (10, 0)
"""Compute capability of the first GPUs that do not need it."""


def set_connections(parallel: ParallelConfig) -> None:
    """Sets the variable to 1 for this process where Megatron wants it, unless the user has set it. Call it before any CUDA."""
    if VARIABLE not in os.environ and wants_one_connection(parallel, gpu_capability()):
        os.environ[VARIABLE] = "1"


def set_interface(interface: str | None) -> None:
    """Has NCCL of this process connect by ``rollout.server.interface``, unless the user has set another: servers on other
    machines do, and the two would look for each other on different networks. Call it before any NCCL.
    """
    if interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def wants_one_connection(parallel: ParallelConfig, capability: tuple[int, int] | None) -> bool:
    """Whether Megatron's training wants one connection: tensor or context parallelism on GPUs before Blackwell.

    ``capability`` is the GPU's compute capability, None where there is no GPU.
    """
    return capability is not None and capability < BLACKWELL and (parallel.tp > 1 or parallel.cp > 1)


def gpu_capability() -> tuple[int, int] | None:
    """Returns the compute capability of the first GPU, None where there is none. Starts no CUDA: NVIDIA's driver answers."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    gpu, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    try:
        if nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu)):
            return None
        if nvml.nvmlDeviceGetCudaComputeCapability(gpu, ctypes.byref(major), ctypes.byref(minor)):
            return None
    finally:
        nvml.nvmlShutdown()
    return major.value, minor.value
