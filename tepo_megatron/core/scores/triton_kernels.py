"""Triton kernels for the passes over logits.

A program takes a row, or a part if rows are few. A thread loads VECTOR neighbours at once (16 bytes), and merges its sums at
the end. KIND is `Scoring.kind`.
"""

import math

import triton
import triton.language as tl

from tepo_megatron.core.scores.shard import EMPTY_MAX, LOG2_E

_LOG2_E = tl.constexpr(LOG2_E)
_LN_2 = tl.constexpr(math.log(2.0))
_EMPTY = tl.constexpr(EMPTY_MAX)
_TINY = tl.constexpr(2.0**-126)  # of a mixture, whose weights round the least positive numbers to 0
_FAR_BELOW = tl.constexpr(-1e4)
_NO_COLUMN = tl.constexpr(2**30)


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
def _sum(tile: tl.tensor) -> tl.tensor:
    return tl.sum(tl.sum(tile, 2), 0)


@triton.jit
def _scaled(scale: tl.tensor, cross: tl.tensor) -> tl.tensor:
    return tl.where(scale > 0, scale * cross, 0.0)  # it may be infinite


@triton.jit
def _first_column(x: tl.tensor, places: tl.tensor, highest: tl.tensor) -> tl.tensor:
    return tl.min(tl.min(tl.where(x == highest[None, :, None], places, _NO_COLUMN), 2), 0)


@triton.jit
def _add_teacher(
    x: tl.tensor,
    y: tl.tensor,
    places: tl.tensor,
    before: tl.tuple,
    after: tl.tuple,
    sums: tl.tuple,
    to_log2: float,
    KIND: tl.constexpr,
) -> tl.tuple:
    """``before``, ``after``: the student's sums without and with the tile."""
    highest, total, cross, column, teacher_column = sums
    higher = tl.maximum(highest, tl.max(tl.max(y, 2), 0))
    t, s = (x - after[0][None, :, None]) * to_log2, (y - higher[None, :, None]) * to_log2
    f = tl.exp2(s)
    own_shift, shift = (before[0] - after[0]) * to_log2, (highest - higher) * to_log2
    scale = tl.exp2(shift)
    # A column without a probability adds nothing, whatever the other's logarithm is.
    if KIND == 1:
        cross = _scaled(scale, cross + (shift - own_shift) * total) + _sum(tl.where(f > 0, f * (s - t), 0.0))
    if KIND == 2:
        e = tl.exp2(t)
        cross = _scaled(tl.exp2(own_shift), cross + (own_shift - shift) * before[1]) + _sum(tl.where(e > 0, e * (t - s), 0.0))
    total = scale * total + _sum(f)
    column = tl.where(after[0] > before[0], _first_column(x, places, after[0]), column)
    teacher_column = tl.where(higher > highest, _first_column(y, places, higher), teacher_column)
    return higher, total, cross, column, teacher_column


@triton.jit
def _store_teacher(
    target: tl.tensor, label: tl.tensor, student: tl.tuple, sums: tl.tuple, to_log2: float, KIND: tl.constexpr
) -> None:
    highest, total, cross, column, teacher_column = sums
    own_top, top = tl.max(student[0], 0), tl.max(highest, 0)
    own_shift, shift = (student[0] - own_top) * to_log2, (highest - top) * to_log2
    if KIND == 2:
        cross = _scaled(tl.exp2(own_shift), cross + (own_shift - shift) * student[1])
    else:
        cross = _scaled(tl.exp2(shift), cross + (shift - own_shift) * total)
    tl.store(target, tl.min(tl.where(student[0] == own_top, column, _NO_COLUMN), 0).to(tl.float32))
    tl.store(target + 1, top)
    tl.store(target + 2, tl.sum(tl.exp2(shift) * total, 0))
    tl.store(target + 3, tl.min(tl.where(highest == top, teacher_column, _NO_COLUMN), 0).to(tl.float32))
    tl.store(target + 4, label)
    tl.store(target + 5, tl.sum(cross, 0) * _LN_2)


@triton.jit
def statistics_kernel(
    logits: tl.tensor,
    row_stride: int,
    column_stride: int,
    teacher: tl.tensor,
    teacher_row_stride: int,
    teacher_column_stride: int,
    rows: tl.tensor,
    label_columns: tl.tensor,
    labels_inside: tl.tensor,
    parts: tl.tensor,
    columns: int,
    width: int,
    span: int,
    to_log2: float,
    STATISTICS: tl.constexpr,
    KIND: tl.constexpr,
    VECTORS: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    """Program (r, j) writes statistics of part j of scored row r to ``parts`` [J, R, STATISTICS]."""
    TILE: tl.constexpr = VECTORS * THREADS * VECTOR
    SQUARES: tl.constexpr = STATISTICS % 6 == 0  # a teacher adds 6
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
    columns_T = tl.full([THREADS], _NO_COLUMN, tl.int32)
    teacher_sums = (tl.full([THREADS], _EMPTY, tl.float32), zeros, zeros, columns_T, columns_T)
    teacher_label = label
    if KIND:
        teacher += row * teacher_row_stride
        teacher_label = tl.load(_at(teacher, tl.load(label_columns + r), teacher_column_stride), mask=label_here, other=0)
    for start in range(first, whole, TILE):
        x = tl.load(_at(source, start + tile, column_stride)).to(tl.float32)
        before = sums
        sums = _add_tile(x, sums, to_log2, SQUARES)
        if KIND:
            y = tl.load(_at(teacher, start + tile, teacher_column_stride)).to(tl.float32)
            teacher_sums = _add_teacher(x, y, start + tile, before, sums, teacher_sums, to_log2, KIND)
    if whole < stop:  # loads are bounded by the width, mostly a multiple of a vector's, which the true vocabulary need not be
        rest = whole + tile
        x = tl.load(_at(source, rest, column_stride), mask=rest < width, other=0).to(tl.float32)
        x, before = tl.where(rest < stop, x, float("-inf")), sums
        sums = _add_tile(x, sums, to_log2, SQUARES)
        if KIND:
            y = tl.load(_at(teacher, rest, teacher_column_stride), mask=rest < width, other=0).to(tl.float32)
            y = tl.where(rest < stop, y, float("-inf"))
            teacher_sums = _add_teacher(x, y, rest, before, sums, teacher_sums, to_log2, KIND)
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
    if KIND:
        _store_teacher(target + STATISTICS - 6, teacher_label.to(tl.float32), sums, teacher_sums, to_log2, KIND)


@triton.jit
def _probability(
    row: tl.tensor, columns: tl.tensor, stride: int, inside: tl.tensor, highest: tl.tensor, log_sum: tl.tensor, to_log2: float
) -> tl.tensor:
    """The logarithm to base 2; −inf outside."""
    x = tl.load(_at(row, columns, stride), mask=inside, other=float("-inf")).to(tl.float32)
    return (x - highest) * to_log2 - log_sum * _LOG2_E


@triton.jit
def mixture_kernel(
    logits: tl.tensor,
    row_stride: int,
    column_stride: int,
    teacher: tl.tensor,
    teacher_row_stride: int,
    teacher_column_stride: int,
    rows: tl.tensor,
    maxima: tl.tensor,
    log_sums: tl.tensor,
    teacher_maxima: tl.tensor,
    teacher_log_sums: tl.tensor,
    parts: tl.tensor,
    columns: int,
    span: int,
    to_log2: float,
    beta: float,
    VECTORS: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    """Program (r, j) writes the sums of `Backend.mixture` of part j of scored row r to ``parts`` [J, R, 2]."""
    TILE: tl.constexpr = VECTORS * THREADS * VECTOR
    r, part = tl.program_id(0), tl.program_id(1)
    row = r.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + r)
    source, other = logits + row * row_stride, teacher + row * teacher_row_stride
    highest, log_sum = tl.load(maxima + r), tl.load(log_sums + r)
    teacher_highest, teacher_log_sum = tl.load(teacher_maxima + r), tl.load(teacher_log_sums + r)
    first = part * span
    stop = tl.minimum(first + span, columns)
    student, others = tl.zeros([THREADS], tl.float32), tl.zeros([THREADS], tl.float32)
    for start in range(first, stop, TILE):
        places = start + _tile(VECTORS, THREADS, VECTOR)
        log_p = _probability(source, places, column_stride, places < stop, highest, log_sum, to_log2)
        log_q = _probability(other, places, teacher_column_stride, places < stop, teacher_highest, teacher_log_sum, to_log2)
        p, q = tl.exp2(log_p), tl.exp2(log_q)
        log_m = tl.log2(tl.maximum((1 - beta) * p + beta * q, _TINY))
        student += _sum(tl.where(p > 0, p * (log_p - log_m), 0.0))
        others += _sum(tl.where(q > 0, q * (log_q - log_m), 0.0))
    target = parts + 2 * (part * tl.num_programs(0) + r)
    tl.store(target, tl.sum(student, 0) * _LN_2)
    tl.store(target + 1, tl.sum(others, 0) * _LN_2)


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
def _teacher_terms(terms: tl.tensor, count: int) -> tl.tuple:
    factor, highest = tl.load(terms + 2 * count), tl.load(terms + 3 * count)
    return factor, highest, tl.load(terms + 4 * count), tl.load(terms + 5 * count)


@triton.jit
def _further_tile(
    x: tl.tensor, y: tl.tensor, highest: tl.tensor, teacher: tl.tuple, to_log2: float, KIND: tl.constexpr
) -> tl.tensor:
    factor, teacher_highest, of_student, of_teacher = teacher
    s = (y - teacher_highest) * to_log2
    if KIND == 1:
        return factor * tl.exp2(s)
    e = tl.exp2((x - highest) * to_log2)
    if KIND == 3:
        s = tl.log2(tl.maximum(of_student * e + of_teacher * tl.exp2(s), _TINY))
    return tl.where(e > 0, factor * e * s, 0.0)


@triton.jit
def gradient_kernel(
    logits: tl.tensor,
    row_stride: int,
    column_stride: int,
    out: tl.tensor,
    out_row_stride: int,
    out_column_stride: int,
    teacher: tl.tensor,
    teacher_row_stride: int,
    teacher_column_stride: int,
    numbers: tl.tensor,
    label_columns: tl.tensor,
    labels_inside: tl.tensor,
    maxima: tl.tensor,
    log_sums: tl.tensor,
    entropies: tl.tensor,
    grad_logprob: tl.tensor,
    grad_entropy: tl.tensor,
    teacher_terms: tl.tensor,
    count: int,
    columns: int,
    width: int,
    span: int,
    to_log2: float,
    per_temperature: float,
    KIND: tl.constexpr,
    VECTORS: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    """Program (token, j) writes part j, or zeros. ``teacher_terms``: `torch_sweep.teacher_terms` of ``count`` rows."""
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
    of_teacher = terms
    if KIND:
        teacher += token.to(tl.int64) * teacher_row_stride
        teacher_terms += r
        terms = (terms[0] + tl.load(teacher_terms), terms[1] + tl.load(teacher_terms + count), terms[2])
        of_teacher = _teacher_terms(teacher_terms, count)
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
        if KIND:
            y = tl.load(_at(teacher, places, teacher_column_stride)).to(tl.float32)
            gradient += _further_tile(x, y, highest, of_teacher, to_log2, KIND)
        tl.store(_at(target, places, out_column_stride), gradient.to(out.dtype.element_ty))
    if whole < stop:
        places = whole + tile
        x = tl.load(_at(source, places, column_stride), mask=places < width, other=0).to(tl.float32)
        gradient = _gradient_tile(x, places, highest, to_log2, label, terms)
        if KIND:
            y = tl.load(_at(teacher, places, teacher_column_stride), mask=places < width, other=0).to(tl.float32)
            gradient += _further_tile(x, y, highest, of_teacher, to_log2, KIND)
        gradient = tl.where(places < stop, gradient, 0.0)
        tl.store(_at(target, places, out_column_stride), gradient.to(out.dtype.element_ty), mask=places < width)
    zeros = tl.zeros([VECTORS, THREADS, VECTOR], out.dtype.element_ty)
    for start in range(empty, last, TILE):
        tl.store(_at(target, start + tile, out_column_stride), zeros, mask=start + tile < width)
