"""Where the trainer runs: CPU with gloo, or CUDA with NCCL."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Literal

import torch

from tepo_megatron.config import EngineConfig
from tepo_megatron.engine import platform_cpu


@dataclass(frozen=True)
class Platform:
    kind: Literal["cpu", "cuda"]
    device: torch.device
    backend: str

    def megatron(self) -> contextlib.AbstractContextManager[None]:
        """The context in which Megatron's code is called."""
        return platform_cpu.cuda_means_cpu() if self.kind == "cpu" else contextlib.nullcontext()


def select_platform(config: EngineConfig) -> Platform:
    """The platform that the config asks for, made ready (device chosen, or CPU patches installed).

    Raises RuntimeError where CUDA is asked for and torch sees none.
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
