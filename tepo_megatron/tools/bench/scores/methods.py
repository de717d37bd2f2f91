"""The methods of ``tepo bench scores``. Tensor-parallel ranks call them after Megatron's groups are made."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.core.scores import logprob_and_entropy
from tepo_megatron.core.scores.backend import Backend, BackendName, get_backend
from tepo_megatron.core.scores.combine import RowScores, combine
from tepo_megatron.core.scores.shard import Scoring, plan_scoring
from tepo_megatron.tools.bench.scores.peers import Method, Outputs, peer_methods
from tepo_megatron.tools.bench.settings import DENSE, FLOOR, MEGATRON, SLOPE


def methods(device: str, logits: Tensor, labels: Tensor) -> dict[str, Method]:
    own: dict[str, dict[str, Method]] = {
        "cpu": {
            "tepo_megatron": partial(_own, backend="torch"),
            **_with_and_without_slope("tepo_megatron, in place", "torch"),
            **_with_and_without_slope("tepo_megatron, in place, C++", "cpp"),
        },
        "cuda": {
            "tepo_megatron, torch": partial(_own, backend="torch"),
            "tepo_megatron, torch, in place": partial(_own, backend="torch", inplace_backward=True),
            "tepo_megatron, Triton": partial(_own, backend="triton"),
            **_with_and_without_slope("tepo_megatron, Triton, in place", "triton"),
        },
    }
    if device == "cuda":
        own["cuda"]["Triton's kernels alone, in place"] = _kernels(logits, labels)
        own["cuda"]["Triton's kernels alone, in place" + SLOPE] = _kernels(logits, labels, entropy_slope=True)
    return {
        **own[device],
        **peer_methods(),
        MEGATRON: _megatron,
        DENSE: _dense,
        FLOOR: _Floor.apply,
    }


def _with_and_without_slope(name: str, backend: BackendName) -> dict[str, Method]:
    options: dict[str, Any] = {"backend": backend, "inplace_backward": True}
    return {name: partial(_own, **options), name + SLOPE: partial(_own, entropy_slope=True, **options)}


def _own(logits: Tensor, labels: Tensor, **options: Any) -> Outputs:
    scores = logprob_and_entropy(logits, labels, tp_group=dist.group.WORLD, **options)
    return scores.logprob, scores.entropy


def _kernels(logits: Tensor, labels: Tensor, *, entropy_slope: bool = False) -> Method:
    """Only the two passes, without checks, labels, collective, or combining of shards."""
    group, backend = dist.group.WORLD, get_backend("triton", logits.device)
    tokens, width = logits.shape
    scoring = plan_scoring(
        labels,
        tokens=tokens,
        width=width,
        tp_group=group,
        temperature=1.0,
        vocab_size=None,
        mask_T=None,
        entropy_slope=entropy_slope,
    )
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
    """No mathematics, only the memory traffic that every method has."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Outputs:
        ctx.save_for_backward(logits)
        return (logits.view(torch.int64).sum(1).float() * 0,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        logits.detach().view(torch.int64).bitwise_xor_(1)
        return logits.detach(), None
