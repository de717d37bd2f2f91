"""Launches `triton_kernels`. Without atomics and tuning, equal inputs give equal bits."""

import contextlib
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tepo_megatron.core.scores import triton_kernels
from tepo_megatron.core.scores.shard import LOG2_E, Gradients, Logits, RowScores, Scoring, mapped, merge
from tepo_megatron.core.scores.torch_sweep import IN_TORCH, teacher_terms

IS_INTERPRETED = not isinstance(triton_kernels.statistics_kernel, triton.JITFunction)

_VECTOR_BYTES = 16
_ELEMENTS = 16  # per thread in a tile: two vectors in bf16; the forward pass then needs 32 registers, so all threads fit
_WIDE = 32768  # columns from which a row gets 8 warps: every warp pays the fixed cost of a row
_WARPS_PER_PROCESSOR = 64


class _Grid(NamedTuple):
    parts: int  # programs that share a row
    span: int  # columns of a part, a multiple of a tile's
    constants: dict[str, int]


def statistics(logits: Logits, scoring: Scoring, stats_RK: Tensor) -> None:
    logits_TVp = logits.student
    if logits_TVp.dtype == torch.float64:
        return IN_TORCH.statistics(logits, scoring, stats_RK)
    if not scoring.count:
        return
    grid = _cut(logits_TVp, scoring.count, scoring.columns)
    parts_JRK = stats_RK[None] if grid.parts == 1 else stats_RK.new_empty(grid.parts, scoring.count, scoring.statistics)
    with _on_device_of(logits_TVp):
        triton_kernels.statistics_kernel[(scoring.count, grid.parts)](
            logits_TVp,
            *logits_TVp.stride(),
            *_teacher(logits.teacher),
            scoring.rows_R,
            scoring.labels.column_R,
            scoring.labels.inside_R,
            parts_JRK,
            scoring.columns,
            logits_TVp.shape[1],
            grid.span,
            LOG2_E / scoring.temperature,
            STATISTICS=scoring.statistics,
            KIND=scoring.kind,
            **grid.constants,
        )
    if grid.parts > 1:
        stats_RK.copy_(merge(parts_JRK, scoring.temperature, scoring.divergence))


def mixture(logits: Logits, scoring: Scoring, scores: RowScores, sums_R2: Tensor) -> None:
    logits_TVp = logits.student
    if logits_TVp.dtype == torch.float64:
        return IN_TORCH.mixture(logits, scoring, scores, sums_R2)
    if not scoring.count:
        return
    assert scoring.divergence is not None
    grid = _cut(logits_TVp, scoring.count, scoring.columns)
    parts_JR2 = sums_R2.new_empty(grid.parts, scoring.count, 2)
    with _on_device_of(logits_TVp):
        triton_kernels.mixture_kernel[(scoring.count, grid.parts)](
            logits_TVp,
            *logits_TVp.stride(),
            *_teacher(logits.teacher),
            scoring.rows_R,
            scores.max_R,
            scores.log_sum_R,
            scores.teacher_max_R,
            scores.teacher_log_sum_R,
            parts_JR2,
            scoring.columns,
            grid.span,
            LOG2_E / scoring.temperature,
            scoring.divergence.beta,
            **grid.constants,
        )
    torch.sum(parts_JR2, 0, out=sums_R2)


def _teacher(teacher_TVp: Tensor | None) -> tuple[Tensor | None, int, int]:
    return (None, 0, 0) if teacher_TVp is None else (teacher_TVp, teacher_TVp.stride(0), teacher_TVp.stride(1))


def gradient(logits: Logits, scoring: Scoring, scores: RowScores, gradients: Gradients, out_TVp: Tensor) -> None:
    logits_TVp = logits.student
    if logits_TVp.dtype == torch.float64:
        return IN_TORCH.gradient(logits, scoring, scores, gradients, out_TVp)
    if not scoring.count:
        out_TVp.zero_()
        return
    grid, kind = _cut(logits_TVp, scoring.tokens, logits_TVp.shape[1]), 0
    terms_NR: Tensor | None = None
    if gradients.divergence is not None:
        kind, terms_NR = scoring.kind, teacher_terms(scoring, scores, scoring.of_rows(gradients.divergence))
    with _on_device_of(logits_TVp):
        triton_kernels.gradient_kernel[(scoring.tokens, grid.parts)](
            logits_TVp,
            *logits_TVp.stride(),
            out_TVp,
            *out_TVp.stride(),
            *_teacher(logits.teacher if kind else None),
            _numbers(scoring),
            scoring.labels.column_R,
            scoring.labels.inside_R,
            scores.max_R,
            scores.log_sum_R,
            scores.entropy_R,
            *mapped(gradients, Tensor.contiguous)[:2],
            terms_NR,
            scoring.count,
            scoring.columns,
            logits_TVp.shape[1],
            grid.span,
            LOG2_E / scoring.temperature,
            1 / scoring.temperature,
            KIND=kind,
            **grid.constants,
        )


def _numbers(scoring: Scoring) -> Tensor | None:
    """int32 [T]: the token's row among the scored ones, or −1."""
    rows_R = scoring.rows_R
    if rows_R is None:
        return None
    numbers_T = rows_R.new_full((scoring.tokens,), -1, dtype=torch.int32)
    return numbers_T.index_copy_(0, rows_R, torch.arange(scoring.count, dtype=torch.int32, device=rows_R.device))


def _cut(logits_TVp: Tensor, rows: int, columns: int) -> _Grid:
    if logits_TVp.is_cuda:
        threads = 128 if columns < _WIDE else 256
        processors = torch.cuda.get_device_properties(logits_TVp.device).multi_processor_count
        programs = processors * _WARPS_PER_PROCESSOR * 32 // threads  # as many as run at once; a warp is 32 threads
    else:  # the interpreter, where a few columns are to make several tiles, and a few rows several parts
        threads, programs = 8, 8
    tile = threads * _ELEMENTS
    tiles = max(1, -(-columns // tile))
    per_part = -(-tiles // min(max(1, programs // rows), tiles))
    vector = _VECTOR_BYTES // logits_TVp.element_size()
    constants = {"VECTORS": _ELEMENTS // vector, "THREADS": threads, "VECTOR": vector, "num_warps": max(1, threads // 32)}
    return _Grid(-(-tiles // per_part), per_part * tile, constants)


def _on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
