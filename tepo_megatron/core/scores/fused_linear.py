"""Scores of sharded logits, or of hidden states and a head's shard."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tepo_megatron.core.scores.backend import Backend, BackendName, get_backend
from tepo_megatron.core.scores.shard import Gradients, Logits, RowScores, Scoring, all_gather, combine, mapped
from tepo_megatron.core.types import Checks, TeacherHead, TeacherLogits, TeacherTopK, TokenScores

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# logits of a chunk and their gradient: for each chunk, the whole weight gradient is read and written once
_CHUNK_BYTES = {"cpu": 32 * 1024 * 1024}
_CHUNK_BYTES_ACCELERATOR = 256 * 1024 * 1024
_PART_ROWS = 4096

_Head = tuple[Tensor, Tensor]  # hidden states of scored rows [R, H], and the weight [Vp, H]
_Outputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def fused_linear_logprob_and_entropy(
    hidden_TH: Tensor,
    weight_VpH: Tensor,
    labels_T: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    mask_T: Tensor | None = None,
    sequence_parallel: bool = False,
    entropy_slope: bool = False,
    kept_TK: Tensor | None = None,
    teacher: TeacherHead | TeacherTopK | None = None,
    gradient_accumulation_fusion: bool = False,
    scored: int | None = None,
    checks: Checks | None = None,
    backend: BackendName = "auto",
) -> TokenScores:
    """Computes `logprob_and_entropy` of ``hidden @ weightᵀ`` a chunk at a time, without all logits.

    Logits of bfloat16 or float16 factors are fp32 and never rounded to their dtype.

    All ranks of ``tp_group`` call, forward and backward. Forward all-gathers 16 bytes (24 with the entropy's slope) per scored
    token and rank. Backward recomputes the logits and all-reduces the hidden states' gradient. Under sequence parallelism both
    all-gather the hidden states, and their gradient is reduce-scattered. A ``teacher`` adds 24 bytes, its own products and, for
    ``jsd``, one all-gather of 8 bytes a token; there the statistics are gathered a chunk at a time. A `TeacherTopK` adds 4
    bytes for each of its tokens.

    Args:
        hidden_TH: [T, H]; with ``sequence_parallel`` this rank's rows, [T/p, H].
        weight_VpH: [V/p, H], rank r's rows of the head; the gradient is accumulated in fp32.
        labels_T: of all tokens, also under sequence parallelism; likewise ``mask_T`` and ``kept_TK``.
        gradient_accumulation_fusion: as in Megatron, add the weight's gradient to ``weight_VpH.main_grad`` (fp32), if there is
            one, and set ``grad_added_to_main_grad``. Autograd's gradient then only runs hooks; for a tied weight
            (``zero_out_wgrad``) it is the embedding's.
    """
    fits = hidden_TH.ndim == weight_VpH.ndim == 2 and hidden_TH.shape[1] == weight_VpH.shape[1]
    if not fits or hidden_TH.dtype != weight_VpH.dtype or not hidden_TH.is_floating_point():
        raise ValueError(
            f"hidden_TH is {hidden_TH.dtype} {tuple(hidden_TH.shape)} and weight_VpH {weight_VpH.dtype} "
            f"{tuple(weight_VpH.shape)}; give [tokens, H] and [columns of this shard, H] of one floating-point dtype"
        )
    with_logits = None if isinstance(teacher, TeacherTopK) else teacher
    if with_logits is not None:
        hidden_TG, weight_VpG = with_logits.hidden_TG, with_logits.weight_VpG
        fits = hidden_TG.ndim == weight_VpG.ndim == 2 and hidden_TG.shape[1] == weight_VpG.shape[1]
        fits = fits and (len(hidden_TG), len(weight_VpG)) == (len(hidden_TH), len(weight_VpH))
        if not fits or not hidden_TG.dtype == weight_VpG.dtype == hidden_TH.dtype:
            raise ValueError(
                f"the teacher's hidden_TG is {hidden_TG.dtype} {tuple(hidden_TG.shape)} and its weight_VpG {weight_VpG.dtype} "
                f"{tuple(weight_VpG.shape)}; give the tokens, the columns of this shard and the dtype of the student's, "
                f"({len(hidden_TH)}, G) and ({len(weight_VpH)}, G) in {hidden_TH.dtype}"
            )
    gather_group = tp_group if sequence_parallel else None
    world = 1 if gather_group is None else dist.get_world_size(gather_group)
    scoring = Scoring.plan(
        labels_T,
        tokens=hidden_TH.shape[0] * world,
        width=weight_VpH.shape[0],
        tp_group=tp_group,
        temperature=temperature,
        vocab_size=vocab_size,
        mask_T=mask_T,
        entropy_slope=entropy_slope,
        kept_TK=kept_TK,
        teacher=teacher,
        scored=scored,
        checks=checks,
    )
    backend_of_device = get_backend(backend, hidden_TH.device, few_tokens=kept_TK is not None, top_k=scoring.top is not None)
    apply = _FusedLinear.apply
    scores = apply(hidden_TH, weight_VpH, scoring, backend_of_device, gather_group, gradient_accumulation_fusion, with_logits)  # type: ignore[no-untyped-call]
    if checks is None:
        scoring.checks.raise_first()
    return TokenScores(*scores, checks=checks)


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight_VpH: Tensor,
        scoring: Scoring,
        backend: Backend,
        gather_group: ProcessGroup | None,
        gradient_accumulation_fusion: bool,
        teacher: TeacherHead | None,
    ) -> _Outputs:
        student = _rows(hidden, scoring, gather_group), weight_VpH
        of_teacher = None if teacher is None else (_rows(teacher.hidden_TG, scoring, gather_group), teacher.weight_VpG)
        stats_RK = hidden.new_empty(scoring.count, scoring.statistics, dtype=torch.promote_types(hidden.dtype, torch.float32))
        gathered: list[Tensor] = []
        mixture_R2 = stats_RK.new_empty(scoring.count, 2)
        for index, chunk, logits, _ in _chunks(scoring, student, of_teacher):
            backend.statistics(logits, chunk, stats_RK[index])
            if scoring.has_mixture:  # while there are logits: they are not computed again
                gathered.append(scoring.gather(stats_RK[index]))
                backend.mixture(logits, chunk, combine(gathered[-1], chunk)[0], mixture_R2[index])
        stats_pRK = torch.cat(gathered, 1) if gathered else scoring.gather(stats_RK)
        ctx.backend, ctx.gather_group = backend, gather_group
        # The parameter itself, for its attributes: a saved tensor need not be the same object.
        ctx.parameter = weight_VpH if gradient_accumulation_fusion and hasattr(weight_VpH, "main_grad") else None
        ctx.has_teacher = teacher is not None
        frozen = () if teacher is None else (teacher.hidden_TG, teacher.weight_VpG)
        return _scores_of(ctx, scoring, stats_pRK, mixture_R2, hidden, weight_VpH, *frozen)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_logprob_T: Tensor | None,
        grad_entropy_T: Tensor | None,
        _: Tensor | None,
        grad_divergence_T: Tensor | None,
        *__: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        hidden, weight_VpH, *saved = ctx.saved_tensors
        gradients = Gradients(grad_logprob_T, grad_entropy_T, grad_divergence_T)
        if all(gradient is None for gradient in gradients):
            return (None,) * 7
        scoring: Scoring = ctx.scoring
        student = _rows(hidden, scoring, ctx.gather_group), weight_VpH
        teacher: _Head | None = None
        if ctx.has_teacher:
            hidden_TG, weight_VpG, *saved = saved
            if grad_divergence_T is not None:
                teacher = _rows(hidden_TG, scoring, ctx.gather_group), weight_VpG
        grad_weight_VpH: Tensor | None = None  # of a frozen head, which has none
        if ctx.needs_input_grad[1] and ctx.parameter is None:
            grad_weight_VpH = torch.zeros_like(weight_VpH, dtype=torch.promote_types(weight_VpH.dtype, torch.float32))
        elif ctx.needs_input_grad[1]:
            grad_weight_VpH = ctx.parameter.main_grad
        rows, of_rows = RowScores(*saved), mapped(gradients, scoring.of_rows)
        grad_hidden_RH = _add_gradients(scoring, ctx.backend, student, teacher, rows, of_rows, grad_weight_VpH)
        del student, teacher
        grad_hidden = scoring.to_tokens(grad_hidden_RH)
        if ctx.gather_group is not None and grad_hidden.numel():
            grad_hidden = _reduce_scatter(grad_hidden, ctx.gather_group)
        elif scoring.tp_group is not None and grad_hidden.numel():
            dist.all_reduce(grad_hidden, group=scoring.tp_group)
        if grad_weight_VpH is not None:
            grad_weight_VpH = grad_weight_VpH.to(weight_VpH.dtype) if ctx.parameter is None else _placeholder(ctx.parameter)
        return grad_hidden, grad_weight_VpH, None, None, None, None, None


def _scores_of(ctx: Any, scoring: Scoring, stats_pRK: Tensor, mixture_R2: Tensor, *saved: Tensor | None) -> _Outputs:
    rows, others = combine(stats_pRK, scoring, scoring.gather(mixture_R2).sum(0) if scoring.has_mixture else None)
    scoring.check_finite(stats_pRK, rows, others.divergence_R)
    ctx.scoring = scoring
    ctx.set_materialize_grads(False)  # a score that the loss does not use has gradient None, and costs nothing
    ctx.save_for_backward(*saved, *rows)
    slope_T, divergence_T, teacher_T, same_T = (None if it_R is None else scoring.to_tokens(it_R) for it_R in others)
    ctx.mark_non_differentiable(*(values_T for values_T in (slope_T, teacher_T, same_T) if values_T is not None))
    return scoring.to_tokens(rows.logprob_R), scoring.to_tokens(rows.entropy_R), slope_T, divergence_T, teacher_T, same_T


def _add_gradients(
    scoring: Scoring,
    backend: Backend,
    student: _Head,
    teacher: _Head | None,
    rows: RowScores,
    gradients: Gradients,
    grad_weight_VpH: Tensor | None,
) -> Tensor:
    hidden_RH, weight_VpH = student
    grad_hidden_RH = torch.empty_like(hidden_RH)
    # The logits are computed again, since this function avoids keeping them.
    for index, chunk, logits, gradient_cVp in _chunks(scoring, student, teacher, gradient=True):
        part = itemgetter(index)
        backend.gradient(logits, chunk, mapped(rows, part), mapped(gradients, part), gradient_cVp)
        torch.mm(gradient_cVp, weight_VpH, out=grad_hidden_RH[index])
        if grad_weight_VpH is not None:
            _add_product(grad_weight_VpH, gradient_cVp.t(), hidden_RH[index])
    return grad_hidden_RH


def _placeholder(parameter: Any) -> Tensor | None:
    """DDP's hook expects a gradient; without, autograd runs it in another thread on a GPU. A tied weight needs the hook."""
    parameter.grad_added_to_main_grad = True
    return None if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like(parameter)


def _chunks(
    scoring: Scoring, student: _Head, teacher: _Head | None, *, gradient: bool = False
) -> Iterator[tuple[slice, Scoring, Logits, Tensor]]:
    """Yields a chunk's logits, and a buffer for their gradient in the factors' dtype: the same if the dtypes are."""
    hidden_RH, weight_VpH = student
    width, dtype = weight_VpH.shape[0], torch.promote_types(hidden_RH.dtype, torch.float32)
    apart = gradient and dtype != hidden_RH.dtype
    budget = _CHUNK_BYTES.get(hidden_RH.device.type, _CHUNK_BYTES_ACCELERATOR)
    logits_bytes = dtype.itemsize * (1 if scoring.divergence is None else 2)
    size = max(16, budget // (width * (logits_bytes + (hidden_RH.dtype.itemsize if apart else 0))))
    buffer = hidden_RH.new_empty(min(size, hidden_RH.shape[0]), width, dtype=dtype)
    gradients = torch.empty_like(buffer, dtype=hidden_RH.dtype) if apart else buffer
    for_teacher = None if teacher is None else torch.empty_like(buffer)
    for start in range(0, hidden_RH.shape[0], size):
        index = slice(start, min(start + size, hidden_RH.shape[0]))
        chunk = scoring.chunk(index)
        logits = mapped(Logits(buffer, for_teacher), itemgetter(slice(chunk.tokens)))
        _multiply(hidden_RH[index], weight_VpH, logits.student)
        if teacher is not None and logits.teacher is not None:
            _multiply(teacher[0][index], teacher[1], logits.teacher)
        yield index, chunk, logits, gradients[: chunk.tokens]


def _multiply(hidden_cH: Tensor, weight_VpH: Tensor, out_cVp: Tensor) -> None:
    if out_cVp.dtype == weight_VpH.dtype:
        torch.mm(hidden_cH, weight_VpH.t(), out=out_cVp)
    elif out_cVp.is_cuda:
        torch.mm(hidden_cH, weight_VpH.t(), out_dtype=out_cVp.dtype, out=out_cVp)
    else:  # as in `_add_product`
        hidden_cH = hidden_cH.to(out_cVp.dtype)
        for start in range(0, weight_VpH.shape[0], _PART_ROWS):
            index = slice(start, start + _PART_ROWS)
            torch.mm(hidden_cH, weight_VpH[index].to(out_cVp.dtype).t(), out=out_cVp[:, index])


def _add_product(sum_VH: Tensor, left_Vc: Tensor, right_cH: Tensor) -> None:
    if sum_VH.dtype == left_Vc.dtype:
        sum_VH.addmm_(left_Vc, right_cH)
    elif sum_VH.is_cuda:
        torch.addmm(sum_VH, left_Vc, right_cH, out_dtype=sum_VH.dtype, out=sum_VH)
    else:  # torch has no such product on a CPU: the factors are widened, the larger one in parts
        right_cH = right_cH.to(sum_VH.dtype)
        for start in range(0, sum_VH.shape[0], _PART_ROWS):
            index = slice(start, start + _PART_ROWS)
            sum_VH[index].addmm_(left_Vc[index].to(sum_VH.dtype), right_cH)


def _rows(hidden: Tensor, scoring: Scoring, group: ProcessGroup | None) -> Tensor:
    return scoring.of_rows(hidden if group is None else all_gather(hidden, group))


def _reduce_scatter(values: Tensor, group: ProcessGroup) -> Tensor:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    local = values.new_empty(values.shape[0] // dist.get_world_size(group), *values.shape[1:])
    scatter(local, values.contiguous(), group=group)
    return local


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
    teacher: TeacherLogits | TeacherTopK | None = None,
    scored: int | None = None,
    checks: Checks | None = None,
    backend: BackendName = "auto",
) -> TokenScores:
    """Computes each label's log-probability, the entropy of softmax(logits / temperature), and a divergence from a teacher.

    Every rank of ``tp_group`` calls, with its own columns, and gets the same result. Forward all-gathers 16 bytes (24 with the
    slope, 24 more with a teacher, 4 for each token of a `TeacherTopK`) per scored token, and for ``jsd`` of whole
    distributions, which needs both normalisers before, 8 bytes once more.
    Backward has no collective.

    Args:
        logits_TVp: [T, V/p], rank r's columns from r·V/p on; −inf is probability 0.
        labels_T: int64 [T], numbered over the whole vocabulary.
        temperature: divides the logits, after the upcast.
        vocab_size: columns from it on are padding.
        mask_T: bool [T]; tokens outside score 0 and get gradient 0.
        inplace_backward: write the gradient over the logits.
        entropy_slope: also compute `TokenScores.entropy_slope`, for the logits divided by the temperature.
        kept_TK: int32 or int64 [T, K]: the distribution's tokens other than the label, padded with -1. None: all.
        teacher: also compute a divergence from it, at the same temperature. It excludes ``kept_TK``.
        scored: how many ``mask_T`` has; otherwise the host waits for the device.
        checks: notes errors in labels and logits, which are raised otherwise.
        backend: ``torch``; ``cpp`` for CPUs, compiled on first use; ``triton`` for GPUs; ``auto``: the fastest that works.

    Returns fp32 [T] (fp64 for fp64 logits), natural logarithm, differentiable once, except the slope.

    Raises ValueError on all ranks if a scored row has NaN, +inf, or only −inf, or an infinite divergence; also if arguments do
    not fit.
    """
    if logits_TVp.ndim != 2 or not logits_TVp.is_floating_point():
        raise ValueError(
            f"logits_TVp is {logits_TVp.dtype} {tuple(logits_TVp.shape)}; give floating-point [tokens, columns of this shard]"
        )
    teacher_TVp = None if teacher is None or isinstance(teacher, TeacherTopK) else teacher.logits_TVp
    if teacher_TVp is not None and (teacher_TVp.shape, teacher_TVp.dtype) != (logits_TVp.shape, logits_TVp.dtype):
        raise ValueError(
            f"the teacher's logits_TVp is {teacher_TVp.dtype} {tuple(teacher_TVp.shape)}; give the student's dtype and shape, "
            f"{logits_TVp.dtype} {tuple(logits_TVp.shape)}"
        )
    tokens, width = logits_TVp.shape
    scoring = Scoring.plan(
        labels_T,
        tokens=tokens,
        width=width,
        tp_group=tp_group,
        temperature=temperature,
        vocab_size=vocab_size,
        mask_T=mask_T,
        entropy_slope=entropy_slope,
        kept_TK=kept_TK,
        teacher=teacher,
        scored=scored,
        checks=checks,
    )
    chosen = get_backend(backend, logits_TVp.device, few_tokens=kept_TK is not None, top_k=scoring.top is not None)
    scores = _LogprobAndEntropy.apply(logits_TVp, scoring, chosen, inplace_backward, teacher_TVp)  # type: ignore[no-untyped-call]
    if checks is None:
        scoring.checks.raise_first()
    return TokenScores(*scores, checks=checks)


class _LogprobAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TVp: Tensor, scoring: Scoring, backend: Backend, inplace: bool, teacher_TVp: Tensor | None
    ) -> _Outputs:
        stats_RK = logits_TVp.new_empty(
            scoring.count, scoring.statistics, dtype=torch.promote_types(logits_TVp.dtype, torch.float32)
        )
        logits = Logits(logits_TVp, teacher_TVp)
        backend.statistics(logits, scoring, stats_RK)
        stats_pRK = scoring.gather(stats_RK)
        mixture_R2 = stats_RK.new_empty(scoring.count, 2)
        if scoring.has_mixture:
            backend.mixture(logits, scoring, combine(stats_pRK, scoring)[0], mixture_R2)
        ctx.backend, ctx.inplace = backend, inplace
        return _scores_of(ctx, scoring, stats_pRK, mixture_R2, logits_TVp, teacher_TVp)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_logprob_T: Tensor | None,
        grad_entropy_T: Tensor | None,
        _: Tensor | None,
        grad_divergence_T: Tensor | None,
        *__: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        logits_TVp, teacher_TVp, *saved = ctx.saved_tensors
        gradients = Gradients(grad_logprob_T, grad_entropy_T, grad_divergence_T)
        if all(gradient is None for gradient in gradients):
            return (None,) * 5
        out_TVp = logits_TVp.detach() if ctx.inplace else torch.empty_like(logits_TVp)
        ctx.backend.gradient(Logits(logits_TVp, teacher_TVp), ctx.scoring, RowScores(*saved), gradients, out_TVp)
        if ctx.inplace:  # autograd does not see a kernel's writes; now it refuses another backward that saved these logits
            torch.autograd.graph.increment_version(logits_TVp)
        return out_TVp, None, None, None, None
