from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Literal, Protocol

import torch
from torch import Tensor

from tepo_megatron.core.scores import native
from tepo_megatron.core.scores.shard import Gradients, RowScores, Scoring
from tepo_megatron.core.scores.torch_sweep import IN_TORCH, KeptTokens, RowSweeps, TopK

BackendName = Literal["auto", "torch", "cpp", "triton"]

_IN_CPP = RowSweeps(native.forward, native.mixture, native.backward)


class Backend(Protocol):
    """The passes over a shard [T, Vp]. No collective."""

    def statistics(self, logits_TVp: Tensor, scoring: Scoring, stats_RK: Tensor, teacher_TVp: Tensor | None = None) -> None:
        """Writes the statistics of `combine` into contiguous [R, K], fp32 (fp64 for fp64)."""

    def mixture(self, logits_TVp: Tensor, teacher_TVp: Tensor, scoring: Scoring, scores: RowScores, sums_R2: Tensor) -> None:
        """Writes the shard's part of KL(student ‖ m) and of KL(teacher ‖ m) into [R, 2], with m of ``jsd``."""

    def gradient(
        self,
        logits_TVp: Tensor,
        scoring: Scoring,
        scores: RowScores,
        gradients: Gradients,
        out_TVp: Tensor,
        teacher_TVp: Tensor | None = None,
    ) -> None:
        """Writes all of ``out_TVp``, zeros for padding and masked rows. It may be the logits or have another dtype."""


def get_backend(name: BackendName, device: torch.device, *, few_tokens: bool = False, top_k: bool = False) -> Backend:
    """Raises ValueError for an unusable backend. On a CPU ``triton`` needs its interpreter."""
    if name == "auto":
        name = "triton" if device.type == "cuda" and _has_triton() else "torch"
        name = _fastest_on_cpu() if device.type == "cpu" else name
    backend: Backend = IN_TORCH
    if name == "triton":
        backend = _in_triton(device)
    elif name == "cpp":
        if device.type != "cpu":
            raise ValueError(f"backend = 'cpp' is for logits on CPU, these are on {device}; use backend = 'auto'")
        backend = _IN_CPP
    elif name != "torch":
        raise ValueError(f"backend = {name!r} is unknown; known: auto, torch, cpp, triton")
    if top_k:
        return TopK(backend.statistics, backend.gradient)
    return KeptTokens() if few_tokens else backend


@functools.cache
def _fastest_on_cpu() -> BackendName:
    why_not = native.why_not()
    if why_not is None:
        return "cpp"
    logging.getLogger(__name__).warning("scores are computed in torch, two to three times slower than in C++: %s", why_not)
    return "torch"


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _in_triton(device: torch.device) -> Backend:
    if not _has_triton():
        raise ValueError(
            "backend = 'triton', but triton is not installed; install it (pip install triton==3.7.1, 690 MB), or use "
            "backend = 'torch'"
        )
    from tepo_megatron.core.scores import triton_sweep

    if device.type != "cuda" and not triton_sweep.is_interpreted():
        raise ValueError(
            f"backend = 'triton' is for logits on a GPU, these are on {device}; use backend = 'auto', or for a test start the "
            "process with TRITON_INTERPRET=1"
        )
    return triton_sweep
