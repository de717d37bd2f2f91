"""Selects CUDA with NCCL, or a CPU with gloo and a patched Megatron-Core (docs/decisions/005-cpu-patches.md), and divides the
world into groups.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import megatron.core.tensor_parallel.random as megatron_random
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from tepo_megatron.config import EngineConfig, ParallelConfig, RunConfig
from tepo_megatron.runtime.machine import variable
from tepo_megatron.runtime.rendezvous import rank_store, share_gloo_thread
from tepo_megatron.versions import MEGATRON_LINE, MEGATRON_RANGE, in_range, installed_version

_MARGIN_S = 300.0  # the heartbeat watch reports more, and must end the run first
_TIMEOUT = timedelta(seconds=1800 + _MARGIN_S)


@dataclass(frozen=True)
class Platform:
    kind: Literal["cpu", "cuda"]
    device: torch.device
    backend: str

    def megatron(self) -> contextlib.AbstractContextManager[None]:
        """Megatron's code must run in this context."""
        return _cuda_is_cpu() if self.kind == "cpu" else contextlib.nullcontext()

    def initialize(self, config: ParallelConfig, *, seed: int, timeout: timedelta = _TIMEOUT) -> Ranks:
        """Joins torchrun's world, or makes one. Every rank calls. Raises ValueError for another size."""
        world = variable("WORLD_SIZE", 1)
        if world != config.world_size:
            raise ValueError(
                f"engine.parallel asks for tp {config.tp} × pp {config.pp} × cp {config.cp} × dp {config.dp} = "
                f"{config.world_size} processes, "
                f"but torchrun started {world}; start {config.world_size} or change engine.parallel"
            )
        share_gloo_thread()
        if not dist.is_initialized():
            # torch exports HashStore without saying so
            store = rank_store(world, timeout) if "RANK" in os.environ else dist.HashStore()  # type: ignore[attr-defined]
            rank = variable("RANK", 0)
            dist.init_process_group(self.backend, store=store, rank=rank, world_size=world, timeout=timeout)
        ranks = Ranks.split(config, timeout=timeout)
        with self.megatron():
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
        return ranks

    @staticmethod
    def destroy() -> None:
        """On CPUs it waits for no rank, but NCCL does."""
        parallel_state.destroy_model_parallel()  # also what an interrupted start has made
        if dist.is_initialized():
            dist.destroy_process_group()

    def host_group(self, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
        """None if torch's default group waits on the host. Every rank calls."""
        return None if self.backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout or _TIMEOUT)

    @staticmethod
    def cpu_patches() -> list[tuple[Any, str, Any]]:
        """Returns (owner, name, replacement)."""
        import megatron.core.optimizer as megatron_optimizer
        from megatron.core.models.common.embeddings import rope_utils
        from megatron.core.optimizer import distrib_optimizer

        from tepo_megatron.trainer.megatron.parallel.positions import rotate_packed

        def random_state(*_: Any, **__: Any) -> torch.Tensor:
            return torch.get_rng_state()

        return [
            (torch.cuda, "current_device", lambda: torch.device("cpu")),  # the device of new parameters and buffers
            (torch.cuda, "get_rng_state", random_state),  # the tracker of model-parallel random states
            (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),  # tied embeddings on the first and last stage
            (megatron_random, "_get_cuda_rng_state", random_state),  # recomputation, which would replay dropout; there is none
            (megatron_optimizer, "HybridDeviceOptimizer", _HybridOnCpu),  # states on the host: which tensors are offloaded
            (distrib_optimizer, "HybridDeviceOptimizer", _HybridOnCpu),  # the same, for shards of the distributed optimizer
            (rope_utils, "fused_apply_rotary_pos_emb_thd", rotate_packed),  # Transformer Engine's kernel
            (torch.cuda, "Stream", _HostStream),  # the streams in which gradients go to the host and weights come back
            (torch.cuda, "current_stream", lambda *_: _HostStream()),  # what those streams wait for
        ]


def select_platform(config: EngineConfig) -> Platform:
    """Sets the device, or installs CPU patches. Raises RuntimeError if CUDA is missing, or for another Megatron-Core."""
    installed = installed_version("megatron-core")
    if installed is None or not in_range(installed, MEGATRON_RANGE):
        raise RuntimeError(
            f"megatron-core {installed} is not supported; install {MEGATRON_LINE}.x "
            f"(pip install 'megatron-core{MEGATRON_RANGE}')"
        )
    has_gpu = torch.cuda.is_available()
    if config.platform == "cuda" and not has_gpu:
        raise RuntimeError(
            f"engine.platform = cuda, but torch {torch.__version__} sees no GPU; "
            "install a CUDA build of torch, or set engine.platform=cpu"
        )
    if config.platform == "cpu" or not has_gpu:
        _install_cpu_patches()
        return Platform("cpu", torch.device("cpu"), "gloo")
    device = torch.device("cuda", variable("LOCAL_RANK", 0))
    torch.cuda.set_device(device)
    torch.cuda.set_per_process_memory_fraction(config.gpu_memory_fraction, device)
    return Platform("cuda", device, "nccl")


def _install_cpu_patches() -> None:
    """Idempotent. Raises RuntimeError with a GPU."""
    if torch.cuda.is_available():
        raise RuntimeError(
            "engine.platform = cpu patches torch.cuda, and this machine has a GPU; hide it (CUDA_VISIBLE_DEVICES=)"
        )
    for owner, name, replacement in Platform.cpu_patches():
        setattr(owner, name, replacement)


@contextlib.contextmanager
def _cuda_is_cpu() -> Iterator[None]:
    # a torch function mode, which sees every call of torch, takes a quarter of a small model's time
    patches: list[tuple[Any, str, Any]] = [(torch.Tensor, "type", _type_on_cuda)]
    patches.append((megatron_random, "_set_cuda_rng_state", lambda *_, **__: None))  # torch would keep each call, for ever
    patches += [(torch, name, partial(_on_cpu, getattr(torch, name))) for name in ("tensor", "zeros", "ones")]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    try:
        for owner, name, replacement in patches:
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _on_cpu(make: Callable[..., torch.Tensor], *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    is_cuda = device is not None and torch.device(device).type == "cuda"
    return make(*args, device=torch.device("cpu") if is_cuda else device, **kwargs)


_TYPE = torch.Tensor.type


def _type_on_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    result = _TYPE(tensor, *args, **kwargs)
    return "torch.cuda." + result.rpartition(".")[2] if isinstance(result, str) else result


class _HybridOnCpu(HybridDeviceOptimizer):  # type: ignore[misc] # Megatron has no types
    """Megatron's own looks for CUDA tensors and, without, misses their copies."""

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> tuple[Any, ...]:
        total = sum(param.numel() for group in self.param_groups for param in group["params"])
        host_groups, device_groups, copies, masters, offloaded = [], [], {}, {}, 0
        for group in self.param_groups:
            on_host: list[torch.Tensor] = []
            on_device: list[torch.Tensor] = []
            for param in group["params"]:
                inner = param
                if moves := offloaded < total * offload_fraction:
                    inner = param.detach().clone()
                    offloaded += param.numel()
                if self.param_update_in_fp32 and inner.dtype != torch.float32:
                    inner = inner.detach().clone().float()
                    masters[param] = inner
                if moves:
                    copies[param] = inner
                (on_host if moves else on_device).append(inner)
            host_groups += [{**group, "params": on_host}] if on_host else []
            device_groups += [{**group, "params": on_device}] if on_device else []
        return host_groups, device_groups, copies, {inner: param for param, inner in copies.items()}, masters


class _HostStream:
    def wait_stream(self, _: object) -> None: ...

    def record_event(self) -> _HostStream:
        return self

    def wait(self, _: object) -> None: ...

    def synchronize(self) -> None: ...


def collective_timeout(config: RunConfig) -> timedelta:
    # in a weight update rank 0 may wait for servers while the others wait in a collective
    return timedelta(seconds=config.train.hang_timeout_s + config.rollout.server.longest_wait_s + _MARGIN_S)


@dataclass(frozen=True)
class Ranks:
    """Numbered tp innermost, then cp, dp and pp. Groups of size 1 are None."""

    rank: int
    world: int
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    dp: int
    dp_rank: int
    cp: int
    cp_rank: int
    tp_group: dist.ProcessGroup | None
    cp_group: dist.ProcessGroup | None
    vpp: int = 1

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @classmethod
    def split(cls, config: ParallelConfig, *, gloo: bool = True, timeout: timedelta = _TIMEOUT) -> Ranks:
        """Makes Megatron's groups in torch's world. Every rank calls."""
        parallel_state.initialize_model_parallel(
            config.tp,
            config.pp,
            virtual_pipeline_model_parallel_size=config.vpp if config.vpp > 1 else None,
            context_parallel_size=config.cp,
            expert_model_parallel_size=config.ep,
            expert_tensor_parallel_size=config.etp,
            distributed_timeout_minutes=math.ceil(timeout / timedelta(minutes=1)),  # Megatron's own is 30
            create_gloo_process_groups=gloo,
        )
        return cls(
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            tp=config.tp,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            pp=config.pp,
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            dp=config.dp,
            dp_rank=parallel_state.get_data_parallel_rank(),
            cp=config.cp,
            cp_rank=parallel_state.get_context_parallel_rank(),
            tp_group=parallel_state.get_tensor_model_parallel_group() if config.tp > 1 else None,
            cp_group=parallel_state.get_context_parallel_group() if config.cp > 1 else None,
            vpp=config.vpp,
        )
