"""Finds GPU software and hardware without CUDA, and checks their abilities."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import MappingProxyType, ModuleType

from tepo_megatron.config import OptimizerConfig, RunConfig
from tepo_megatron.versions import TE_RANGE, installed_version
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts import check_trainer_models

INSTALL_TE = f"pip install --no-build-isolation 'transformer-engine[pytorch]{TE_RANGE}'"
WGRAD = "fused_weight_gradient_mlp_cuda"  # apex' extension: adds weight gradients to Megatron's buffer


class _BeforeMegatron(MetaPathFinder):
    """Tries Transformer Engine before Megatron-Core's first import, and hides it if it is broken.

    Megatron-Core survives an ImportError only; a missing or foreign torch part raises FileNotFoundError or OSError, which would
    end runs with ``engine.layers=local`` too.

    Where torch has no CUDA, Megatron-Core's functions are not compiled: a CPU gains nothing, and ``torch.compile`` imports its
    compiler in every rank (1 s of a core, 40 MB). Nor does it import W&B (0.5 s), which no rank uses.
    """

    problem: str | None = None
    """Why the Transformer Engine that is installed is not used."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        execute = {"megatron.core": _without_wandb, "megatron.core.jit": _execute_jit}.get(fullname)
        if execute is None:
            return None
        if execute is _without_wandb:
            self._try()
        else:
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]  # importlib iterates over the old list
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader.exec_module = partial(execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _try(self) -> None:
        if importlib.util.find_spec("transformer_engine") is None:
            return
        try:
            importlib.import_module("transformer_engine.pytorch")
        except Exception as error:  # whatever a wrong build raises
            self.problem = f"{type(error).__name__}: {error}"
            for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
                del sys.modules[name]
            sys.modules["transformer_engine"] = None  # type: ignore[assignment] # its imports raise ModuleNotFoundError


def _without_wandb(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    hidden = "wandb" not in sys.modules
    if hidden:
        sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        execute(module)
    finally:
        if hidden:
            del sys.modules["wandb"]


def _execute_jit(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    import torch

    execute(module)
    if torch.version.cuda is None and torch.version.hip is None:
        module.disable_jit_fuser()


TRANSFORMER_ENGINE = _BeforeMegatron()
sys.meta_path.insert(0, TRANSFORMER_ENGINE)


@dataclass(frozen=True)
class Packages:
    te: str | None = None
    apex: bool = False
    wgrad: bool = False

    @classmethod
    def installed(cls) -> Packages:
        # a broken package counts until Megatron-Core is imported
        te = None if TRANSFORMER_ENGINE.problem else installed_version("transformer-engine")
        return cls(te=te, apex=_has_nvidia_apex(), wgrad=importlib.util.find_spec(WGRAD) is not None)

    @property
    def adam(self) -> tuple[str, str]:
        """Returns (package, reason). Megatron-Core tries Transformer Engine's, apex', then torch's."""
        if self.te is not None:
            return "Transformer Engine's", "it is installed"
        if self.apex:
            return "apex'", "there is no Transformer Engine, and NVIDIA's apex is installed"
        return "torch's", "there is neither Transformer Engine nor NVIDIA's apex"


def _has_nvidia_apex() -> bool:
    # PyPI has another project of that name
    spec = importlib.util.find_spec("apex")
    folders = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    return bool(folders) and all((folders[0] / part).is_dir() for part in ("optimizers", "multi_tensor_apply"))


CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

_BLACKWELL = (10, 0)


def prepare_process(config: RunConfig) -> None:
    """Sets unset variables. Call before CUDA and NCCL start. Raises RuntimeError.

    Megatron wants ``CUDA_DEVICE_MAX_CONNECTIONS=1`` for tensor and context parallelism before Blackwell.
    """
    if INDUCTOR_VARIABLE not in os.environ:
        os.environ[INDUCTOR_VARIABLE] = str(_own_cache())
    parallel, interface = config.engine.parallel, config.rollout.server.interface
    if interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    if CONNECTIONS_VARIABLE not in os.environ and (parallel.tp > 1 or parallel.cp > 1):
        capability = _gpu_capability()
        if capability is not None and capability < _BLACKWELL:
            os.environ[CONNECTIONS_VARIABLE] = "1"


def _own_cache() -> Path:
    # torch unpickles and runs what is there, and its default is a folder that another user may have made
    folder = Path(tempfile.gettempdir()) / f"torchinductor-{os.geteuid()}"
    advice = f"set {INDUCTOR_VARIABLE} to a folder of yours"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise RuntimeError(f"torch cannot keep compiled code in {folder}: {error.strerror}; {advice}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise RuntimeError(
            f"torch would load code from {folder}, which belongs to user {status.st_uid} and has mode "
            f"{stat.S_IMODE(status.st_mode):04o}, so that others may write to it; remove it, or {advice}"
        )
    return folder


def _gpu_capability() -> tuple[int, int] | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    gpu, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    failed = nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))
    failed = failed or nvml.nvmlDeviceGetCudaComputeCapability(gpu, ctypes.byref(major), ctypes.byref(minor))
    nvml.nvmlShutdown()
    return None if failed else (major.value, minor.value)


def check_config(
    config: RunConfig, spec: ModelSpec, *, on_gpu: bool, teachers: Mapping[str, ModelSpec] = MappingProxyType({})
) -> None:
    """Raises ValueError for what this trainer cannot train. ``teachers``: those on its ranks."""
    compares_logits = "divergence" in config.objective.needs
    check_trainer_models(spec, teachers, config.engine.parallel, config.engine.fp8, compares_logits=compares_logits)
    spec.check_recompute(config.engine.recomputed, transformer_engine=on_gpu and config.engine.layers != "local")
    spec.check_balance(config.engine.moe_balance.kind)
    _check_states(config.optimizer, on_gpu=on_gpu)


def _check_states(config: OptimizerConfig, *, on_gpu: bool) -> None:
    """Raises ValueError if no package here has smaller states."""
    if not config.precision_aware:
        return
    field = config.reduced_fields[0]
    wants = f"optimizer.{field} = {str(getattr(config, field)).lower()} needs Transformer Engine's Adam on a GPU"
    if not on_gpu:
        raise ValueError(f"{wants}, and the trainer runs on a CPU; leave it out, or use optimizer.offload_fraction")
    if importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(f"{wants}, and it is not installed (docs/reference/gpu.md); install it, or leave {field} out")
