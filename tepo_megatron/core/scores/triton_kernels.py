"""Triton kernels for the passes over logits.

A program takes a row, or a part if rows are few. A thread loads VECTOR neighbours at once (16 bytes), and merges its sums at
the end.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from tepo_megatron.core.scores.shard import EMPTY_MAX

_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2.0))
_EMPTY = tl.constexpr(EMPTY_MAX)
_FAR_BELOW = tl.constexpr(-1e4)


@triton.jit
def _tile(VECTORS: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr) -> tl.tensor:
    vectors = tl.arange(0, VECTORS)[:, None, None] * (THREADS * VECTOR)
    threads = tl.arange(0, THREADS)[None, :, None] * VECTOR
    return vectors + threads + tl.arange(0, VECTOR)[None, None, :]


@triton.jit
def _at(row: tl.tensor, columns: tl.tensor, stride: int) -> tl.tensor:
    return row + columns.to(tl.int64) * stride


@triton.jit
def _exponents(x: tl.tensor, highest: tl.tensor, to_log2: float) -> tl.tensor:
    return tl.maximum((x - highest) * to_log2, _FAR_BELOW, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _add_tile(x: tl.tensor, sums: tl.tuple, to_log2: float, SQUARES: tl.constexpr) -> tl.tuple:
    highest, total, weighted, square, weighted_square = sums
    higher = tl.maximum(highest, tl.max(tl.max(x, 2), 0))
    t = _exponents(x, higher[None, :, None], to_log2)
    e = tl.exp2(t)
    # The sums so far are scaled to the new maximum, as in `combine.merge`.
    shift = _exponents(highest, higher, to_log2)
    scale = tl.exp2(shift)
    weighted = scale * (weighted + shift * total) + tl.sum(tl.sum(e * t, 2), 0)
    total = scale * total + tl.sum(tl.sum(e, 2), 0)
    if SQUARES:
        e2 = e * e
        scale = scale * scale
        weighted_square = scale * (weighted_square + shift * square) + tl.sum(tl.sum(e2 * t, 2), 0)
        square = scale * square + tl.sum(tl.sum(e2, 2), 0)
    return higher, total, weighted, square, weighted_square


@triton.jit
def statistics_kernel(
    logits: tl.tensor,
    row_stride: int,
    column_stride: int,
    rows: tl.tensor,
    label_columns: tl.tensor,
    labels_inside: tl.tensor,
    parts: tl.tensor,
    columns: int,
    width: int,
    span: int,
    to_log2: float,
    STATISTICS: tl.constexpr,
    VECTORS: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    """Program (r, j) writes statistics of part j of scored row r to ``parts`` [J, R, STATISTICS]."""
    TILE: tl.constexpr = VECTORS * THREADS * VECTOR
    SQUARES: tl.constexpr = STATISTICS == 6
    r, part = tl.program_id(0), tl.program_id(1)
    row = r.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + r)
    source = logits + row * row_stride
    label_here = tl.load(labels_inside + r) & (part == 0)
    label = tl.load(_at(source, tl.load(label_columns + r), column_stride), mask=label_here, other=0).to(tl.float32)
    tile = _tile(VECTORS, THREADS, VECTOR)
    first = part * span
    stop = tl.minimum(first + span, columns)
    whole = first + (stop - first) // TILE * TILE
    zeros = tl.zeros([THREADS], tl.float32)
    sums = (tl.full([THREADS], _EMPTY, tl.float32), zeros, zeros, zeros, zeros)
    for start in range(first, whole, TILE):
        x = tl.load(_at(source, start + tile, column_stride)).to(tl.float32)
        sums = _add_tile(x, sums, to_log2, SQUARES)
    if whole < stop:  # loads are bounded by the width, mostly a multiple of a vector's, which the true vocabulary need not be
        rest = whole + tile
        x = tl.load(_at(source, rest, column_stride), mask=rest < width, other=0).to(tl.float32)
        sums = _add_tile(tl.where(rest < stop, x, float("-inf")), sums, to_log2, SQUARES)
    # Every thread has a maximum and sums of its own until here; they are merged as `combine.merge` does with shards.
    highest, total, weighted, square, weighted_square = sums
    top = tl.max(highest, 0)
    shift = _exponents(highest, top, to_log2)
    scale = tl.exp2(shift)
    target = parts + (part * tl.num_programs(0) + r) * STATISTICS
    tl.store(target, top)
    tl.store(target + 1, tl.sum(scale * total, 0))
    tl.store(target + 2, tl.sum(scale * (weighted + shift * total), 0) * _LN_2)
    tl.store(target + 3, label)
    if SQUARES:
        scale = scale * scale
        tl.store(target + 4, tl.sum(scale * square, 0))
        tl.store(target + 5, tl.sum(scale * (weighted_square + shift * square), 0) * _LN_2)


@triton.jit
def _gradient_terms(
    r: tl.tensor,
    token: tl.tensor,
    log_sums: tl.tensor,
    entropies: tl.tensor,
    grad_logprob: tl.tensor,
    grad_entropy: tl.tensor,
    per_temperature: float,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The gradient is e^t · (constant + slope · t), plus at_label in its column."""
    log_sum = tl.load(log_sums + r)
    scale = tl.exp2(-log_sum * _LOG2_E) * per_temperature
    constant, slope, at_label = 0.0, 0.0, 0.0
    if grad_logprob is not None:
        grad = tl.load(grad_logprob + token)
        constant -= grad * scale
        at_label += grad * per_temperature
    if grad_entropy is not None:
        grad = tl.load(grad_entropy + token)
        constant -= grad * scale * (tl.load(entropies + r) - log_sum)
        slope -= grad * scale * _LN_2
    return constant, slope, at_label


@triton.jit
def _gradient_tile(
    x: tl.tensor, places: tl.tensor, highest: tl.tensor, to_log2: float, label: tl.tensor, terms: tl.tuple
) -> tl.tensor:
    constant, slope, at_label = terms
    t = _exponents(x, highest, to_log2)
    return tl.exp2(t) * (constant + slope * t) + tl.where(places == label, at_label, 0.0)


@triton.jit
def gradient_kernel(
    logits: tl.tensor,
    row_stride: int,
    column_stride: int,
    out: tl.tensor,
    out_row_stride: int,
    out_column_stride: int,
    numbers: tl.tensor,
    label_columns: tl.tensor,
    labels_inside: tl.tensor,
    maxima: tl.tensor,
    log_sums: tl.tensor,
    entropies: tl.tensor,
    grad_logprob: tl.tensor,
    grad_entropy: tl.tensor,
    columns: int,
    width: int,
    span: int,
    to_log2: float,
    per_temperature: float,
    VECTORS: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    """Program (token, j) writes part j, or zeros."""
    TILE: tl.constexpr = VECTORS * THREADS * VECTOR
    token, part = tl.program_id(0), tl.program_id(1)
    r = token
    if numbers is not None:
        r = tl.load(numbers + token)
        columns = tl.where(r < 0, 0, columns)  # a row that is not scored is all padding
        r = tl.maximum(r, 0)
    source, target = logits + token.to(tl.int64) * row_stride, out + token.to(tl.int64) * out_row_stride
    highest = tl.load(maxima + r)
    label = tl.where(tl.load(labels_inside + r), tl.load(label_columns + r), -1).to(tl.int32)  # −1 is no column
    terms = _gradient_terms(r, token, log_sums, entropies, grad_logprob, grad_entropy, per_temperature)
    tile = _tile(VECTORS, THREADS, VECTOR)
    first = part * span
    last = tl.minimum(first + span, width)
    stop = tl.minimum(last, columns)
    # Columns [first, stop) have a gradient: whole tiles up to `whole`, then one with a mask. From `empty` on all are 0.
    taken = tl.maximum(stop - first, 0)
    whole, empty = first + taken // TILE * TILE, first + tl.cdiv(taken, TILE) * TILE
    for start in range(first, whole, TILE):
        places = start + tile
        x = tl.load(_at(source, places, column_stride)).to(tl.float32)
        gradient = _gradient_tile(x, places, highest, to_log2, label, terms)
        tl.store(_at(target, places, out_column_stride), gradient.to(out.dtype.element_ty))
    if whole < stop:
        places = whole + tile
        x = tl.load(_at(source, places, column_stride), mask=places < width, other=0).to(tl.float32)
        gradient = _gradient_tile(x, places, highest, to_log2, label, terms)
        gradient = tl.where(places < stop, gradient, 0.0)
        tl.store(_at(target, places, out_column_stride), gradient.to(out.dtype.element_ty), mask=places < width)
    zeros = tl.zeros([VECTORS, THREADS, VECTOR], out.dtype.element_ty)
    for start in range(empty, last, TILE):
        tl.store(_at(target, start + tile, out_column_stride), zeros, mask=start + tile < width)
