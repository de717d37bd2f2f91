"""Log-prob and entropy of sharded logits: one collective forward, none backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from tepo_megatron.types import TokenScores
from tepo_megatron.vocab_parallel.combine import EMPTY_MAX, combine
from tepo_megatron.vocab_parallel.shard import VocabShard, check_labels, check_temperature, scored_rows
from tepo_megatron.vocab_parallel.sweep import Workspace, chunks, compute_dtype, logit_gradient, row_statistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def logprob_and_entropy(
    logits_TVp: Tensor,
    labels_T: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    mask_T: Tensor | None = None,
    inplace_backward: bool = False,
    backend: Literal["torch"] = "torch",
) -> TokenScores:
    """Log-probability of each label and entropy of the whole distribution, softmax(logits / temperature).

    Every rank of ``tp_group`` calls, with its own columns of the same rows and the same other arguments, and gets the same result.
    One all-gather of 16 bytes per scored token and rank forward, no collective backward. The logits are upcast chunk by chunk and
    left as they are; beyond the outputs, memory grows by a workspace of fixed size, and by the gradient.

    Args:
        logits_TVp: bf16, fp16, fp32 (or fp64) [T, V/p], rank r's columns r·V/p and on; −inf is probability 0.
        labels_T: int64 [T], the same on all ranks, numbered over the whole vocabulary.
        tp_group: the tensor-parallel group; None for a vocabulary in one piece.
        temperature: divides the logits, after the upcast.
        vocab_size: the true size V; columns from it on are padding, excluded whatever they hold. Default: no padding.
        mask_T: bool [T]; tokens outside are not read, score 0, and get gradient 0.
        inplace_backward: write the gradient over the logits' storage. For logits that nothing else reads after the loss.

    Returns:
        fp32 [T] each (fp64 for fp64 logits), natural logarithm, differentiable (once) in the logits.

    Raises:
        ValueError: shapes or dtypes do not fit, a label is outside [0, V), a scored row has NaN, +inf, or only −inf logits. The
            last three are raised on all ranks of the group alike.
    """
    if logits_TVp.ndim != 2 or not logits_TVp.is_floating_point():
        raise ValueError(f"logits_TVp is {logits_TVp.dtype} {tuple(logits_TVp.shape)}; give floating-point [tokens, columns of this shard]")
    if backend != "torch":
        raise ValueError(f"backend = {backend!r} is unknown; known: torch")
    check_temperature(temperature)
    rows_R = scored_rows(mask_T, labels_T, logits_TVp.shape[0])
    shard = VocabShard.of(logits_TVp.shape[1], vocab_size, tp_group)
    labels_R = labels_T if rows_R is None else labels_T[rows_R]
    check_labels(labels_R, rows_R, shard.vocab_size)
    plan = _Plan(shard, labels_R, rows_R, temperature, tp_group, inplace_backward)
    logprob_T, entropy_T = _LogprobAndEntropy.apply(logits_TVp, plan)
    return TokenScores(logprob_T, entropy_T)


@dataclass(frozen=True)
class _Plan:
    shard: VocabShard
    labels_R: Tensor
    rows_R: Tensor | None
    temperature: float
    tp_group: ProcessGroup | None
    inplace_backward: bool


class _LogprobAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TVp: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
        stats_R4, ctx.clamp = shard_statistics(logits_TVp, plan)
        rows = combine(stats_R4, plan.rows_R, plan.temperature, plan.tp_group)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits_TVp, rows.max_R, rows.log_sum_R, rows.entropy_R)
        tokens = logits_TVp.shape[0]
        return scatter_rows(rows.logprob_R, plan.rows_R, tokens), scatter_rows(rows.entropy_R, plan.rows_R, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, None]:
        logits_TVp, max_R, log_sum_R, entropy_R = ctx.saved_tensors
        if grad_logprob_T is None and grad_entropy_T is None:
            return None, None
        plan: _Plan = ctx.plan
        # detach() shares the version counter: whoever else saved the logits for a backward is told that they are gone
        out_TVp = logits_TVp.detach() if plan.inplace_backward else torch.empty_like(logits_TVp)
        width = plan.shard.columns
        if width < out_TVp.shape[1]:
            out_TVp[:, width:] = 0
        if plan.rows_R is not None:
            _zero_other_rows(out_TVp, plan.rows_R)
        local_R, inside_R = plan.shard.local(plan.labels_R)
        grad_logprob_R, grad_entropy_R = (
            None if grad_T is None else grad_T if plan.rows_R is None else grad_T[plan.rows_R]
            for grad_T in (grad_logprob_T, grad_entropy_T)
        )
        workspace = Workspace(logits_TVp, width)
        for at, where in chunks(plan.rows_R, logits_TVp.shape[0], workspace.rows if width else 1 << 62):
            if not width:
                break
            grad_cV = logit_gradient(
                logits_TVp[where, :width],
                plan.temperature,
                max_R[at],
                log_sum_R[at],
                entropy_R[at],
                None if grad_logprob_R is None else grad_logprob_R[at],
                None if grad_entropy_R is None else grad_entropy_R[at],
                workspace.pair(at.stop - at.start),
                clamp=ctx.clamp,
            )
            if grad_logprob_R is not None:
                at_label_c1 = (grad_logprob_R[at] * inside_R[at] / plan.temperature).unsqueeze(1)
                grad_cV.scatter_add_(1, local_R[at].unsqueeze(1), at_label_c1)
            out_TVp[where, :width] = grad_cV.to(out_TVp.dtype) if isinstance(where, Tensor) else grad_cV
        return out_TVp, None


def shard_statistics(logits_TVp: Tensor, plan: _Plan) -> tuple[Tensor, bool]:
    """This shard's packed statistics [R, 4] of the scored rows (see `combine`), and whether −inf may be among the logits."""
    shard = plan.shard
    stats_R4 = torch.zeros(plan.labels_R.numel(), 4, dtype=compute_dtype(logits_TVp.dtype), device=logits_TVp.device)
    clamp = logits_TVp.device.type != "cpu"
    if not shard.columns:
        stats_R4[:, 0] = EMPTY_MAX
        return stats_R4, clamp
    workspace = Workspace(logits_TVp, shard.columns)
    for at, where in chunks(plan.rows_R, logits_TVp.shape[0], workspace.rows):
        logits_cV = logits_TVp[where, : shard.columns]
        clamp = row_statistics(logits_cV, plan.temperature, workspace.pair(at.stop - at.start), stats_R4[at], clamp=clamp)
    local_R, inside_R = shard.local(plan.labels_R)
    rows = torch.arange(local_R.numel(), device=local_R.device) if plan.rows_R is None else plan.rows_R
    stats_R4[:, 3] = torch.where(inside_R, logits_TVp[rows, local_R].to(stats_R4.dtype), 0.0)
    return stats_R4, clamp


def scatter_rows(values_R: Tensor, rows_R: Tensor | None, tokens: int) -> Tensor:
    """The scored rows' values at their tokens, 0 elsewhere."""
    return values_R if rows_R is None else values_R.new_zeros(tokens).index_copy(0, rows_R, values_R)


def _zero_other_rows(out_TV: Tensor, rows_R: Tensor) -> None:
    others_T = torch.ones(out_TV.shape[0], dtype=torch.bool, device=out_TV.device)
    others_T[rows_R] = False
    out_TV[others_T] = 0
