"""Computes log-prob and entropy of sharded logits, with one collective forward and none backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tepo_megatron.core.scores.backend import Backend, BackendName, get_backend
from tepo_megatron.core.scores.combine import RowScores, combine
from tepo_megatron.core.scores.shard import Scoring, plan_scoring, to_tokens
from tepo_megatron.core.scores.torch_sweep import compute_dtype
from tepo_megatron.core.types import TokenScores

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
    entropy_slope: bool = False,
    kept_TK: Tensor | None = None,
    backend: BackendName = "auto",
) -> TokenScores:
    """Computes each label's log-probability and the entropy of the whole distribution softmax(logits / temperature).

    Every rank of ``tp_group`` calls, with its own columns and otherwise the same arguments, and gets the same result. Forward:
    one all-gather of 16 bytes (24 with the slope) per scored token. Backward: no collective. Memory grows by the outputs, the
    gradient and a fixed workspace.

    Args:
        logits_TVp: bf16, fp16, fp32 or fp64 [T, V/p], rank r's columns from r·V/p on; −inf is probability 0.
        labels_T: int64 [T], the same on all ranks, numbered over the whole vocabulary.
        tp_group: the tensor-parallel group; None for a vocabulary in one piece.
        temperature: divides the logits, after the upcast.
        vocab_size: the true size V; columns from it on are padding. Default: no padding.
        mask_T: bool [T]; tokens outside are not read, score 0, and get gradient 0.
        inplace_backward: write the gradient over the logits' storage, if nothing else reads them after the loss.
        entropy_slope: also compute `TokenScores.entropy_slope`, for the logits divided by the temperature.
        kept_TK: int32 or int64 [T, K], the same on all ranks: the tokens other than the label that the distribution at t is
            over, each once, padded with -1. None: the whole vocabulary.
        backend: ``torch``; ``cpp`` for CPUs, compiled on first use; ``triton`` for GPUs; ``auto``: the fastest that works.

    Returns:
        fp32 [T] each (fp64 for fp64 logits), natural logarithm, differentiable once in the logits, except the slope.

    Raises:
        ValueError: shapes or dtypes do not fit, a label or kept token is outside [0, V), or a scored row has NaN, +inf, or only
            −inf logits (raised on all ranks).
    """
    if logits_TVp.ndim != 2 or not logits_TVp.is_floating_point():
        raise ValueError(
            f"logits_TVp is {logits_TVp.dtype} {tuple(logits_TVp.shape)}; give floating-point [tokens, columns of this shard]"
        )
    tokens, width = logits_TVp.shape
    scoring = plan_scoring(
        labels_T,
        tokens=tokens,
        width=width,
        tp_group=tp_group,
        temperature=temperature,
        vocab_size=vocab_size,
        mask_T=mask_T,
        entropy_slope=entropy_slope,
        kept_TK=kept_TK,
    )
    chosen = get_backend(backend, logits_TVp.device, kept=kept_TK is not None)
    return TokenScores(*_LogprobAndEntropy.apply(logits_TVp, scoring, chosen, inplace_backward))  # type: ignore[no-untyped-call]


class _LogprobAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TVp: Tensor, scoring: Scoring, backend: Backend, inplace: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        stats_RK = logits_TVp.new_empty(scoring.count, scoring.statistics, dtype=compute_dtype(logits_TVp.dtype))
        backend.statistics(logits_TVp, scoring, stats_RK)
        rows, slope_R = combine(stats_RK, scoring.rows_R, scoring.temperature, scoring.tp_group)
        ctx.scoring, ctx.backend, ctx.inplace = scoring, backend, inplace
        ctx.set_materialize_grads(False)  # a score that the loss does not use has gradient None, and costs nothing
        ctx.save_for_backward(logits_TVp, *rows)
        slope_T = None if slope_R is None else to_tokens(slope_R, scoring)
        if slope_T is not None:
            ctx.mark_non_differentiable(slope_T)
        return to_tokens(rows.logprob_R, scoring), to_tokens(rows.entropy_R, scoring), slope_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob_T: Tensor | None, grad_entropy_T: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        logits_TVp, *saved = ctx.saved_tensors
        if grad_logprob_T is None and grad_entropy_T is None:
            return None, None, None, None
        # detach() shares the version counter: autograd then refuses any other backward that saved the overwritten logits.
        out_TVp = logits_TVp.detach() if ctx.inplace else torch.empty_like(logits_TVp)
        ctx.backend.gradient(logits_TVp, ctx.scoring, RowScores(*saved), grad_logprob_T, grad_entropy_T, out_TVp)
        return out_TVp, None, None, None
