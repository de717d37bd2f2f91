"""Launches `triton_kernels`. Without atomics and tuning, equal inputs give equal bits."""

from __future__ import annotations

import contextlib
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tepo_megatron.core.scores import triton_kernels
from tepo_megatron.core.scores.shard import Gradients, RowScores, Scoring, merge
from tepo_megatron.core.scores.torch_sweep import IN_TORCH

_LOG2_E = math.log2(math.e)
_VECTOR_BYTES = 16
_ELEMENTS = 16  # per thread in a tile: two vectors in bf16; the forward pass then needs 32 registers, so all threads fit
_WIDE = 32768  # columns from which a row gets 8 warps: every warp pays the fixed cost of a row
_WARPS_PER_PROCESSOR = 64


class _Grid(NamedTuple):
    parts: int  # programs that share a row
    span: int  # columns of a part, a multiple of a tile's
    threads: int
    vector: int

    @property
    def constants(self) -> dict[str, int]:
        return {
            "VECTORS": _ELEMENTS // self.vector,
            "THREADS": self.threads,
            "VECTOR": self.vector,
            "num_warps": max(1, self.threads // 32),
        }


def is_interpreted() -> bool:
    return not isinstance(triton_kernels.statistics_kernel, triton.JITFunction)


def statistics(logits_TVp: Tensor, scoring: Scoring, stats_RK: Tensor) -> None:
    if logits_TVp.dtype == torch.float64:
        return IN_TORCH.statistics(logits_TVp, scoring, stats_RK)
    if not scoring.count:
        return
    grid = _cut(logits_TVp, scoring.count, scoring.columns)
    parts_JRK = stats_RK[None] if grid.parts == 1 else stats_RK.new_empty(grid.parts, scoring.count, scoring.statistics)
    with _on_device_of(logits_TVp):
        triton_kernels.statistics_kernel[(scoring.count, grid.parts)](
            logits_TVp,
            *logits_TVp.stride(),
            scoring.rows_R,
            scoring.labels.column_R,
            scoring.labels.inside_R,
            parts_JRK,
            scoring.columns,
            logits_TVp.shape[1],
            grid.span,
            _LOG2_E / scoring.temperature,
            STATISTICS=scoring.statistics,
            **grid.constants,
        )
    if grid.parts > 1:
        stats_RK.copy_(merge(parts_JRK, scoring.temperature))


def gradient(logits_TVp: Tensor, scoring: Scoring, scores: RowScores, gradients: Gradients, out_TVp: Tensor) -> None:
    if logits_TVp.dtype == torch.float64:
        return IN_TORCH.gradient(logits_TVp, scoring, scores, gradients, out_TVp)
    if not scoring.count:
        out_TVp.zero_()
        return
    grid = _cut(logits_TVp, scoring.tokens, logits_TVp.shape[1])
    with _on_device_of(logits_TVp):
        triton_kernels.gradient_kernel[(scoring.tokens, grid.parts)](
            logits_TVp,
            *logits_TVp.stride(),
            out_TVp,
            *out_TVp.stride(),
            _numbers(scoring),
            scoring.labels.column_R,
            scoring.labels.inside_R,
            scores.max_R,
            scores.log_sum_R,
            scores.entropy_R,
            *gradients.map(Tensor.contiguous),
            scoring.columns,
            logits_TVp.shape[1],
            grid.span,
            _LOG2_E / scoring.temperature,
            1 / scoring.temperature,
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
    return _Grid(-(-tiles // per_part), per_part * tile, threads, _VECTOR_BYTES // logits_TVp.element_size())


def _on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
