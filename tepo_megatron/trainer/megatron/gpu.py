"""Finds GPU software and hardware without importing packages or starting CUDA."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from tepo_megatron.config import OptimizerConfig, ParallelConfig
from tepo_megatron.versions import TE_RANGE, installed_version

INSTALL_TE = f"pip install --no-build-isolation 'transformer-engine[pytorch]{TE_RANGE}'"
WGRAD = "fused_weight_gradient_mlp_cuda"  # apex' extension: adds weight gradients to Megatron's buffer


@dataclass(frozen=True)
class Packages:
    te: str | None = None
    apex: bool = False
    wgrad: bool = False


NO_PACKAGES = Packages()


def installed_packages() -> Packages:
    # a broken package counts: nothing is imported
    te = installed_version("transformer-engine")
    return Packages(te=te, apex=is_nvidia_apex(package_folder("apex")), wgrad=importlib.util.find_spec(WGRAD) is not None)


def package_folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def is_nvidia_apex(folder: Path | None) -> bool:
    return folder is not None and (folder / "optimizers").is_dir() and (folder / "multi_tensor_apply").is_dir()


def adam_kernel(packages: Packages) -> tuple[str, str]:
    """Returns (package, reason). Megatron-Core tries Transformer Engine's Adam, then apex', then torch's."""
    if packages.te is not None:
        return "Transformer Engine's", "it is installed"
    if packages.apex:
        return "apex'", "there is no Transformer Engine, and NVIDIA's apex is installed"
    return "torch's", "there is neither Transformer Engine nor NVIDIA's apex"


def norm_kernel(layers: str) -> tuple[str, str]:
    """Returns (package, reason)."""
    if layers == "te":
        return "Transformer Engine's, fused into the linear that follows", "the layers are Transformer Engine's"
    return "torch's", "the layers are Megatron-Core's own, whose fused norm (apex') is no RMSNorm"


CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"

_BLACKWELL = (10, 0)


def set_connections(parallel: ParallelConfig) -> None:
    """Sets ``CUDA_DEVICE_MAX_CONNECTIONS`` to 1 if Megatron wants it and it is unset. Call before CUDA starts."""
    if CONNECTIONS_VARIABLE not in os.environ and wants_one_connection(parallel, gpu_capability()):
        os.environ[CONNECTIONS_VARIABLE] = "1"


def set_interface(interface: str | None) -> None:
    """Must be called before any NCCL."""
    if interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def wants_one_connection(parallel: ParallelConfig, capability: tuple[int, int] | None) -> bool:
    return capability is not None and capability < _BLACKWELL and (parallel.tp > 1 or parallel.cp > 1)


def gpu_capability() -> tuple[int, int] | None:
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


def check_states(config: OptimizerConfig, *, on_gpu: bool) -> None:
    """Raises ValueError if no package here has states in fewer bits."""
    if not config.precision_aware:
        return
    field = config.reduced_fields[0]
    wants = f"optimizer.{field} = {str(getattr(config, field)).lower()} needs Transformer Engine's Adam on a GPU"
    if not on_gpu:
        raise ValueError(f"{wants}, and the trainer runs on a CPU; leave it out, or use optimizer.offload_fraction")
    if importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(f"{wants}, and it is not installed (docs/reference/gpu.md); install it, or leave {field} out")
