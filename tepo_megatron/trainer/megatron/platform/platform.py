"""Selects where the trainer runs: on a CPU with gloo, or on CUDA with NCCL."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Literal

import torch

from tepo_megatron.config import EngineConfig
from tepo_megatron.trainer.megatron.platform import platform_cpu


@dataclass(frozen=True)
class Platform:
    """A kind of device, this rank's device, and torch.distributed's backend for it."""

    kind: Literal["cpu", "cuda"]
    device: torch.device
    backend: str

    def megatron(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which Megatron's code must be called."""
        return platform_cpu.cuda_means_cpu() if self.kind == "cpu" else contextlib.nullcontext()


def select_platform(config: EngineConfig) -> Platform:
    """Returns the config's platform, ready for use: the device is set, or the CPU patches are installed.

    Raises RuntimeError if CUDA is asked for and torch sees no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if config.platform == "cuda" and not has_gpu:
        raise RuntimeError(
            f"engine.platform = cuda, but torch {torch.__version__} sees no GPU; "
            "install a CUDA build of torch, or set engine.platform=cpu"
        )
    if config.platform == "cpu" or not has_gpu:
        platform_cpu.install()
        return Platform("cpu", torch.device("cpu"), "gloo")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    torch.cuda.set_per_process_memory_fraction(config.gpu_memory_fraction, device)
    return Platform("cuda", device, "nccl")
