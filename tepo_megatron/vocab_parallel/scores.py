"""Log-prob and entropy of sharded logits: one collective forward, none backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tepo_megatron.types import TokenScores
from tepo_megatron.vocab_parallel.backend import Backend, BackendName, get_backend
from tepo_megatron.vocab_parallel.combine import EMPTY_MAX, RowScores, combine
from tepo_megatron.vocab_parallel.shard import Scoring, plan_scoring
from tepo_megatron.vocab_parallel.sweep import compute_dtype

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
    backend: BackendName = "torch",
) -> TokenScores:
    """Log-probability of each label and entropy of the whole distribution, softmax(logits / temperature).

    Every rank of ``tp_group`` calls, with its own columns of the same rows and otherwise the same arguments, and gets the same
    result. One all-gather of 16 bytes per scored token and rank forward, no collective backward. The logits are upcast chunk by
    chunk and left as they are; beyond the outputs, memory grows by a workspace of fixed size, and by the gradient.

    Args:
        logits_TVp: bf16, fp16, fp32 (or fp64) [T, V/p], rank r's columns from r·V/p on; −inf is probability 0.
        labels_T: int64 [T], the same on all ranks, numbered over the whole vocabulary.
        tp_group: the tensor-parallel group; None for a vocabulary in one piece.
        temperature: divides the logits, after the upcast.
        vocab_size: the true size V; columns from it on are padding, excluded whatever they hold. Default: no padding.
        mask_T: bool [T]; tokens outside are not read, score 0, and get gradient 0.
        inplace_backward: write the gradient over the logits' storage. For logits that nothing else reads after the loss.
        backend: ``torch``, or ``cpp`` for logits on CPU: several times faster, compiled on first use.

    Returns:
        fp32 [T] each (fp64 for fp64 logits), natural logarithm, differentiable (once) in the logits.

    Raises:
        ValueError: shapes or dtypes do not fit, a label is outside [0, V), a scored row has NaN, +inf, or only −inf logits; the
            last three are raised on all ranks of the group alike.
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
    )
    apply = _LogprobAndEntropy.apply
    logprob_T, entropy_T = apply(logits_TVp, scoring, get_backend(backend, logits_TVp.device), inplace_backward)  # type: ignore[no-untyped-call]
    return TokenScores(logprob_T, entropy_T)


class _LogprobAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TVp: Tensor, scoring: Scoring, backend: Backend, inplace: bool) -> tuple[Tensor, Tensor]:
        stats_R4 = shard_statistics(logits_TVp, scoring, backend)
        rows = combine(stats_R4, scoring.rows_R, scoring.temperature, scoring.tp_group)
        ctx.scoring, ctx.backend, ctx.inplace = scoring, backend, inplace
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits_TVp, *rows)
        return to_tokens(rows.logprob_R, scoring), to_tokens(rows.entropy_R, scoring)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        logits_TVp, *saved = ctx.saved_tensors
        if grad_logprob_T is None and grad_entropy_T is None:
            return None, None, None, None
        # detach() shares the version counter: whoever else saved the logits for a backward is told that they are gone
        out_TVp = logits_TVp.detach() if ctx.inplace else torch.empty_like(logits_TVp)
        write_gradient(logits_TVp, ctx.scoring, ctx.backend, RowScores(*saved), grad_logprob_T, grad_entropy_T, out_TVp)
        return out_TVp, None, None, None


def shard_statistics(logits_TVp: Tensor, scoring: Scoring, backend: Backend) -> Tensor:
    """This shard's packed statistics [R, 4] of the scored rows, see `combine`. No collective."""
    rows_R, labels = scoring.rows_R, scoring.labels
    stats_R4 = logits_TVp.new_zeros(labels.column_R.numel(), 4, dtype=compute_dtype(logits_TVp.dtype))
    if not scoring.columns:
        stats_R4[:, 0] = EMPTY_MAX
        return stats_R4
    backend.forward(logits_TVp[:, : scoring.columns], rows_R, scoring.temperature, stats_R4)
    row_R = torch.arange(labels.column_R.numel(), device=logits_TVp.device) if rows_R is None else rows_R
    label_logit_R = logits_TVp[row_R, labels.column_R].to(stats_R4.dtype)
    stats_R4[:, 3] = torch.where(labels.inside_R, label_logit_R, 0.0)
    return stats_R4


def write_gradient(
    logits_TVp: Tensor,
    scoring: Scoring,
    backend: Backend,
    scores: RowScores,
    grad_logprob_T: Tensor | None,
    grad_entropy_T: Tensor | None,
    out_TVp: Tensor,
) -> None:
    """Write the gradient of this shard's logits, zeros for padding and masked rows included, to ``out_TVp``. No collective."""
    rows_R, columns = scoring.rows_R, scoring.columns
    if rows_R is not None:
        masked_T = torch.ones(scoring.tokens, dtype=torch.bool, device=out_TVp.device).index_fill_(0, rows_R, False)
        out_TVp[masked_T] = 0
    out_TVp[:, columns:] = 0
    if not columns:
        return
    grad_logprob_R = torch.zeros_like(scores.logprob_R) if grad_logprob_T is None else of_rows(grad_logprob_T, scoring)
    grad_entropy_R = None if grad_entropy_T is None else of_rows(grad_entropy_T, scoring)
    backend.backward(
        logits_TVp[:, :columns],
        rows_R,
        scoring.temperature,
        scores,
        scoring.labels,
        grad_logprob_R,
        grad_entropy_R,
        out_TVp[:, :columns],
    )


def to_tokens(values_R: Tensor, scoring: Scoring) -> Tensor:
    """The scored rows' values at their tokens [T], 0 elsewhere."""
    if scoring.rows_R is None:
        return values_R
    return values_R.new_zeros(scoring.tokens).index_copy(0, scoring.rows_R, values_R)


def of_rows(values_T: Tensor, scoring: Scoring) -> Tensor:
    """The tokens' values at the scored rows [R]."""
    return values_T if scoring.rows_R is None else values_T[scoring.rows_R]
