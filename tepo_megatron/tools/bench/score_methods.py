"""The methods of ``tepo bench scores``. Tensor-parallel ranks call them after Megatron's groups are made."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.core.scores import logprob_and_entropy
from tepo_megatron.core.scores.backend import Backend, BackendName, get_backend
from tepo_megatron.core.scores.shard import RowScores, Scoring, combine, plan_scoring

Outputs = tuple[Tensor, ...]
Method = Callable[[Tensor, Tensor], Outputs]  # (logits shard [T, V/p], labels [T]) → outputs [T] for a backward
DENSE = "dense torch log_softmax"
MEGATRON = "Megatron-Core cross-entropy (log-prob only)"
AREAL = "AReaL, both scores"
VERL = "verl, both scores"
FLOOR = "floor: read, then read and write"
SLOPE = ", with the entropy's slope"  # suffix of methods that also give TokenScores.entropy_slope


def methods(device: str, logits: Tensor, labels: Tensor) -> dict[str, Method]:
    if device == "cpu":
        result: dict[str, Method] = {
            "tepo_megatron": partial(_ours, backend="torch"),
            **_with_and_without_slope("tepo_megatron, in place", "torch"),
            **_with_and_without_slope("tepo_megatron, in place, C++", "cpp"),
        }
    else:
        result = {
            "tepo_megatron, torch": partial(_ours, backend="torch"),
            "tepo_megatron, torch, in place": partial(_ours, backend="torch", inplace_backward=True),
            "tepo_megatron, Triton": partial(_ours, backend="triton"),
            **_with_and_without_slope("tepo_megatron, Triton, in place", "triton"),
            "Triton's kernels alone, in place": _kernels(logits, labels),
            "Triton's kernels alone, in place" + SLOPE: _kernels(logits, labels, entropy_slope=True),
        }
    areal = _load("areal", "areal/utils/functional/vocab_parallel.py")
    if areal is not None:
        result[AREAL] = lambda logits, labels: areal._VocabParallelLogProbsEntropy.apply(logits, labels, dist.group.WORLD)
    verl = _load("verl", "verl/utils/megatron/tensor_parallel.py")
    if verl is not None:
        result[VERL] = partial(_verl, verl)
    return {**result, MEGATRON: _megatron, DENSE: _dense, FLOOR: _Floor.apply}


def _with_and_without_slope(name: str, backend: BackendName) -> dict[str, Method]:
    options: dict[str, Any] = {"backend": backend, "inplace_backward": True}
    return {name: partial(_ours, **options), name + SLOPE: partial(_ours, entropy_slope=True, **options)}


def _ours(logits: Tensor, labels: Tensor, **options: Any) -> Outputs:
    scores = logprob_and_entropy(logits, labels, tp_group=dist.group.WORLD, **options)
    return scores.logprob, scores.entropy


def _kernels(logits: Tensor, labels: Tensor, *, entropy_slope: bool = False) -> Method:
    group, backend = dist.group.WORLD, get_backend("triton", logits.device)
    tokens, width = logits.shape
    options: dict[str, Any] = {"temperature": 1.0, "vocab_size": None, "mask_T": None, "entropy_slope": entropy_slope}
    scoring = plan_scoring(labels, tokens=tokens, width=width, tp_group=group, **options)
    stats = torch.empty(tokens, scoring.statistics, device=logits.device)
    backend.statistics(logits, scoring, stats)
    scores, _ = combine(stats, None, 1.0, group)
    return lambda logits, labels: _Kernels.apply(logits, scoring, scores, backend)


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, scoring: Scoring, scores: RowScores, backend: Backend) -> Outputs:
        stats = torch.empty(logits.shape[0], scoring.statistics, device=logits.device)
        backend.statistics(logits, scoring, stats)
        ctx.scoring, ctx.scores, ctx.backend = scoring, scores, backend
        ctx.save_for_backward(logits)
        return stats[:, 1], stats[:, 2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        ctx.backend.gradient(logits, ctx.scoring, ctx.scores, *gradients, logits.detach())
        return logits.detach(), None, None, None


def _megatron(logits: Tensor, labels: Tensor) -> Outputs:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    return (vocab_parallel_cross_entropy(logits.unsqueeze(1), labels.unsqueeze(1)).squeeze(1),)


def _dense(logits: Tensor, labels: Tensor) -> Outputs:
    whole = torch.cat(list(_GatherColumns.apply(logits)), 1)
    logprob = whole.log_softmax(-1, dtype=torch.float32)
    return logprob.gather(1, labels.unsqueeze(1)).squeeze(1), -(logprob.exp() * logprob).sum(-1)


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Outputs:
        ctx.rank = dist.get_rank()
        shards = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, logits.contiguous())
        return tuple(shards)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[ctx.rank]  # every rank computes the whole loss, so its own columns' gradient is complete


class _Floor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Outputs:
        ctx.save_for_backward(logits)
        return (logits.view(torch.int64).sum(1).float() * 0,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        logits.detach().view(torch.int64).bitwise_xor_(1)
        return logits.detach(), None


def _verl(module: ModuleType, logits: Tensor, labels: Tensor) -> Outputs:
    """Uses a copy: Megatron's cross-entropy overwrites its input."""
    retained = logits.clone()
    entropy = module.vocab_parallel_entropy(logits)
    logprob = module.vocab_parallel_log_probs_from_logits(retained.unsqueeze(1), labels.unsqueeze(1)).squeeze(1)
    return logprob, entropy


def _load(distribution: str, file: str) -> Any:
    try:
        path = importlib.metadata.distribution(distribution).locate_file(file)
    except importlib.metadata.PackageNotFoundError:
        return None
    platforms = ModuleType("areal.infra.platforms")  # all that AReaL's file asks of the rest of it: whether this is an NPU
    platforms.is_npu_available = False  # type: ignore[attr-defined]
    sys.modules.setdefault("areal.infra.platforms", platforms)
    spec = importlib.util.spec_from_file_location(f"tepo_megatron_peer_{distribution}", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
