"""Methods to compute divergences from a teacher over a sharded vocabulary, for ``tepo bench scores --teacher``."""

import ast
import sys
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
from tepo_megatron.core.types import Divergence, TeacherHead, TeacherLogits, TeacherTopK

Outputs = tuple[Tensor, ...]
Method = Callable[[Tensor, Tensor], Outputs]  # (logits shard [T, V/p], labels [T]) → outputs [T] for a backward
DIVERGENCES = {item.kind: item for item in (Divergence("forward_kl"), Divergence("reverse_kl"), Divergence("jsd"))}
_HIDDEN, _TOP_K = 128, 64
TOP_K = f"forward_kl of the top {_TOP_K}"
FUSED, PRODUCTS = f"tepo_megatron, fused with products of H {_HIDDEN}", f"products of H {_HIDDEN} alone"
_IMPORTED = {"torch": torch, "F": torch.nn.functional, "nn": torch.nn, "dist": dist, "dist_nn": dist_nn, "Tensor": Tensor}
_IMPORTED |= {"_Loss": torch.nn.modules.loss._Loss, "ABCMeta": type}  # what the peers' functions use
_TRL, _MODELOPT, _NEMO_RL, _VERL = "TRL, whole vocabulary", "ModelOpt", "NeMo-RL's cross-entropy", "verl, whole vocabulary"
_VERL_TOP_K = "verl"
PEERS = (_TRL, _MODELOPT, _NEMO_RL, _VERL, _VERL_TOP_K)


def teacher_methods(logits: Tensor) -> dict[str, Method]:
    """With the divergence at the name's end. Ours give both scores too; only the divergence has a gradient.

    Peers are those with files on ``sys.path``.
    """
    teacher = (logits.float() + torch.randn_like(logits, dtype=torch.float32)).to(logits.dtype)
    factors = [torch.randn(n, _HIDDEN, device=logits.device).to(logits.dtype) for n in (*logits.shape, *logits.shape)]
    top_k = _top_k(teacher)
    result: dict[str, Method] = {
        f"tepo_megatron, in place, {TOP_K}": partial(_ours, teacher=top_k),
        PRODUCTS: partial(_products, factors),
    }
    for kind, divergence in DIVERGENCES.items():
        result[f"tepo_megatron, in place, {kind}"] = partial(_ours, teacher=TeacherLogits(teacher, divergence))
        result[f"{FUSED}, {kind}"] = partial(_fused, factors, divergence)
    if trl := part_of("trl/experimental/gkd/gkd_trainer.py", "generalized_jsd_loss"):
        for kind, divergence in DIVERGENCES.items():
            result[f"{_TRL}, {kind}"] = partial(_trl, trl.generalized_jsd_loss, teacher, divergence)
    if modelopt := part_of("modelopt/torch/distill/plugins/megatron.py", "BaseLoss", "LogitsKLLoss"):
        for kind in ("forward_kl", "reverse_kl"):
            result[f"{_MODELOPT}, {kind}"] = partial(_modelopt, modelopt.LogitsKLLoss, teacher, kind == "reverse_kl")
    softmaxes = [f"_compute_distributed_{name}" for name in ("softmax", "log_softmax", "log_softmax_with_grad")]
    if nemo_rl := part_of("nemo_rl/distributed/model_utils.py", "DistributedCrossEntropy", *softmaxes):
        cross_entropy = nemo_rl.DistributedCrossEntropy.apply
        result[f"{_NEMO_RL}, forward_kl"] = lambda logits, _: (cross_entropy(logits, teacher, dist.group.WORLD, False),)
    if verl := part_of("verl/trainer/distillation/fsdp/losses.py", "kl_divergence"):
        result[f"{_VERL}, forward_kl"] = partial(_verl, verl.kl_divergence, teacher)
    sharded = ("vocab_parallel_log_softmax", "_VocabParallelKLDivergence")
    if verl := part_of("verl/trainer/distillation/megatron/losses.py", *sharded):
        result[f"{_VERL_TOP_K}, {TOP_K}"] = partial(_verl_top_k, verl._VocabParallelKLDivergence.apply, top_k)
    return result


def _top_k(teacher: Tensor) -> TeacherTopK:
    logprobs, ids = whole(teacher).log_softmax(-1, dtype=torch.float32).topk(_TOP_K)
    return TeacherTopK(ids.int(), logprobs, DIVERGENCES["forward_kl"])


def _ours(logits: Tensor, labels: Tensor, teacher: TeacherLogits | TeacherTopK) -> Outputs:
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


def _products(factors: list[Tensor], *_: Tensor) -> Outputs:
    hidden, weight, of_teacher, weight_of_teacher = factors
    logits = hidden.detach().requires_grad_() @ weight.detach().requires_grad_().T
    return (logits.sum(1) + (of_teacher @ weight_of_teacher.T).sum(1),)


def _trl(function: Callable[..., Tensor], teacher: Tensor, divergence: Divergence, logits: Tensor, _: Tensor) -> Outputs:
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": divergence.beta}[divergence.kind]
    return (function(whole(logits), whole(teacher), beta=beta, reduction="none").sum(-1),)


def _verl(function: Callable[..., Tensor], teacher: Tensor, logits: Tensor, _: Tensor) -> Outputs:
    of_student, of_teacher = (whole(values).log_softmax(-1) for values in (logits, teacher))
    return (function(log_q=of_student, log_p=of_teacher),)


def _verl_top_k(function: Callable[..., Outputs], teacher: TeacherTopK, logits: Tensor, _: Tensor) -> Outputs:
    value, *_metrics = function(logits.unsqueeze(0), teacher.logprobs_TK.unsqueeze(0), teacher.ids_TK.long().unsqueeze(0), None)
    return (value.squeeze(0),)


def _modelopt(loss: Callable[..., Any], teacher: Tensor, reverse: bool, logits: Tensor, _: Tensor) -> Outputs:
    config = types.SimpleNamespace(tensor_model_parallel_size=dist.get_world_size())
    value, *_ = loss(config, reverse=reverse)(logits.unsqueeze(1), teacher.unsqueeze(1))
    return (value.squeeze(0),)


def whole(logits: Tensor) -> Tensor:
    return torch.cat(list(_GatherColumns.apply(logits)), 1)


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


def part_of(file: str, *names: str) -> types.ModuleType | None:
    """Returns functions and classes of a peer's file on ``sys.path``, without its imports; None where there is no such file."""
    from megatron.core import parallel_state

    path = next((path for folder in sys.path if (path := Path(folder, file)).is_file()), None)
    if path is None:
        return None
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if getattr(node, "name", None) in names]
    for node in nodes:
        node.decorator_list = []  # type: ignore[attr-defined] # they are functions and classes
    module = types.ModuleType("tepo_megatron_peer_" + file.partition("/")[0])
    vars(module).update(_IMPORTED, mpu=parallel_state, parallel_state=parallel_state)
    tree = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), *nodes], [])  # type: ignore[list-item]
    exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), vars(module))  # noqa: S102 # as an import would
    return module
