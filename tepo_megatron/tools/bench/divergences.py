"""Methods to compute divergences from a teacher over a sharded vocabulary, for ``tepo bench scores --teacher``."""

from __future__ import annotations

import ast
import importlib.metadata
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn as dist_nn
from torch import Tensor

from tepo_megatron.core.scores import fused_linear_logprob_and_entropy, logprob_and_entropy
from tepo_megatron.core.types import Divergence, TeacherHead, TeacherLogits

Outputs = tuple[Tensor, ...]
Method = Callable[[Tensor, Tensor], Outputs]  # (logits shard [T, V/p], labels [T]) → outputs [T] for a backward
DIVERGENCES = {item.kind: item for item in (Divergence("forward_kl"), Divergence("reverse_kl"), Divergence("jsd"))}
_TRL, _MODELOPT, _NEMO_RL = "TRL, whole vocabulary", "ModelOpt", "NeMo-RL's cross-entropy, written out"
PEERS = (_TRL, _MODELOPT, _NEMO_RL)
_HIDDEN = 128


def teacher_methods(logits: Tensor, parallel_state: types.ModuleType) -> dict[str, Method]:
    """With the divergence at the name's end. Ours give both scores too; only the divergence has a gradient."""
    teacher = (logits.float() + torch.randn_like(logits, dtype=torch.float32)).to(logits.dtype)
    factors = [torch.randn(n, _HIDDEN, device=logits.device).to(logits.dtype) for n in (*logits.shape, *logits.shape)]
    trl = _part_of("trl", "trl/experimental/gkd/gkd_trainer.py", "generalized_jsd_loss")
    modelopt = _part_of("nvidia-modelopt", "modelopt/torch/distill/plugins/megatron.py", "BaseLoss", "LogitsKLLoss")
    if modelopt is not None:
        modelopt.parallel_state = parallel_state
    result: dict[str, Method] = {}
    for kind, divergence in DIVERGENCES.items():
        result[f"tepo_megatron, in place, {kind}"] = partial(_ours, teacher=TeacherLogits(teacher, divergence))
        result[f"tepo_megatron, fused with products of H {_HIDDEN}, {kind}"] = partial(_fused, factors, divergence)
        if trl is not None:
            result[f"{_TRL}, {kind}"] = partial(_trl, trl.generalized_jsd_loss, teacher, divergence)
        if modelopt is not None and kind != "jsd":
            result[f"{_MODELOPT}, {kind}"] = partial(_modelopt, modelopt.LogitsKLLoss, teacher, kind == "reverse_kl")
    result[f"{_NEMO_RL}, forward_kl"] = lambda logits, _: (_CrossEntropy.apply(logits, teacher),)
    return result


def _ours(logits: Tensor, labels: Tensor, teacher: TeacherLogits) -> Outputs:
    scores = logprob_and_entropy(logits, labels, tp_group=dist.group.WORLD, inplace_backward=True, teacher=teacher)
    assert scores.divergence is not None
    return (scores.divergence,)


def _fused(factors: list[Tensor], divergence: Divergence, _: Tensor, labels: Tensor) -> Outputs:
    hidden, weight, *of_teacher = factors
    teacher = TeacherHead(of_teacher[0], of_teacher[1], divergence)
    leaves = (hidden.detach().requires_grad_(), weight.detach().requires_grad_())
    scores = fused_linear_logprob_and_entropy(*leaves, labels, tp_group=dist.group.WORLD, teacher=teacher)
    assert scores.divergence is not None
    return (scores.divergence,)


def _trl(function: Callable[..., Tensor], teacher: Tensor, divergence: Divergence, logits: Tensor, _: Tensor) -> Outputs:
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": divergence.beta}[divergence.kind]
    whole, of_teacher = (torch.cat(list(GatherColumns.apply(values)), 1) for values in (logits, teacher))
    return (function(whole, of_teacher, beta=beta, reduction="none").sum(-1),)


def _modelopt(loss: Callable[..., Any], teacher: Tensor, reverse: bool, logits: Tensor, _: Tensor) -> Outputs:
    config = types.SimpleNamespace(tensor_model_parallel_size=dist.get_world_size())
    value, *_ = loss(config, reverse=reverse)(logits.unsqueeze(1), teacher.unsqueeze(1))
    return (value.squeeze(0),)


class _CrossEntropy(torch.autograd.Function):
    """The operations of NeMo-RL's `DistributedCrossEntropy`: a forward KL without the teacher's entropy."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor) -> Tensor:
        q, logp = _log_softmax(teacher).exp_(), _log_softmax(logits)
        value = torch.einsum("tv,tv->t", q, logp).neg_()
        dist.all_reduce(value)
        ctx.save_for_backward(q, logp.exp_())
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        q, p = ctx.saved_tensors
        return (p - q) * gradients[0].unsqueeze(1), None


def _log_softmax(logits: Tensor) -> Tensor:
    values = logits.float()
    highest = values.amax(1, keepdim=True)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    values = values - highest
    total = values.exp().sum(1, keepdim=True)
    dist.all_reduce(total)
    return values - total.log()


class GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Outputs:
        ctx.rank = dist.get_rank()
        shards = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, logits.contiguous())
        return tuple(shards)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[ctx.rank]  # every rank computes the whole loss, so its own columns' gradient is complete


def _part_of(distribution: str, file: str, *names: str) -> Any:
    """Returns functions and classes of an installed package's file, without the imports that they do not need."""
    try:
        path = Path(str(importlib.metadata.distribution(distribution).locate_file(file)))
    except importlib.metadata.PackageNotFoundError:
        return None
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if getattr(node, "name", None) in names]
    for node in nodes:
        node.decorator_list = []  # type: ignore[attr-defined] # they are functions and classes
    module: Any = types.ModuleType(f"tepo_megatron_peer_{distribution}")
    available = {"torch": torch, "F": torch.nn.functional, "nn": torch.nn, "dist_nn": dist_nn, "Tensor": Tensor}
    available |= {"_Loss": torch.nn.modules.loss._Loss, "ABCMeta": type}
    vars(module).update(available)
    tree = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), *nodes], [])  # type: ignore[list-item]
    exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), vars(module))  # noqa: S102 # as an import would
    return module
