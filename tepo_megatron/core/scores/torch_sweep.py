"""Sweeps over logits in torch, in chunks that fit the cache.

T rows, R scored ones, c rows of a chunk, V ≥ 1 columns without padding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from tepo_megatron.core.scores.shard import EMPTY_MAX, LOG2_E, TEACHER_STATISTICS, Gradients, Logits, RowScores, Scoring, mapped

_FAR_BELOW = -1e4  # stands for −inf in an exponent: 0 · −inf is NaN

_WORKSPACE_BYTES = {"cpu": 768 * 1024}  # fits a second-level cache together with the rows
_WORKSPACE_BYTES_ACCELERATOR = 128 * 1024 * 1024  # where a chunk must be large enough to fill the device
_FEW_ROWS = 8


def forward(logits: Logits, scoring: Scoring, stats_RK: Tensor) -> None:
    """Writes all statistics but the labels' logits."""
    for index, where, source_cV, (t_cV, e_cV) in _chunks(logits, scoring.rows_R):
        if logits.teacher is not None:
            _teacher_statistics(source_cV, logits.teacher[where].to(source_cV.dtype), scoring, stats_RK[index])
        max_c1 = source_cV.amax(1, keepdim=True).clamp(min=EMPTY_MAX)
        _exponents(source_cV, max_c1, scoring.temperature, t_cV)
        torch.exp2(t_cV, out=e_cV)
        stats_RK[index, 0:1] = max_c1
        stats_RK[index, 1] = e_cV.sum(1)
        if t_cV.device.type == "cpu" and len(t_cV) <= _FEW_ROWS:
            stats_RK[index, 2] = _inner(t_cV, e_cV) / LOG2_E
            if scoring.entropy_slope:
                stats_RK[index, 5] = _inner(t_cV.mul_(e_cV), e_cV) / LOG2_E
                stats_RK[index, 4] = _inner(e_cV, e_cV)
            continue
        stats_RK[index, 2] = t_cV.mul_(e_cV).sum(1) / LOG2_E
        if scoring.entropy_slope:
            stats_RK[index, 5] = t_cV.mul_(e_cV).sum(1) / LOG2_E
            stats_RK[index, 4] = e_cV.mul_(e_cV).sum(1)


def _teacher_statistics(x_cV: Tensor, y_cV: Tensor, scoring: Scoring, stats_cK: Tensor) -> None:
    assert scoring.divergence is not None
    (max_c, first_c), (teacher_max_c, teacher_first_c) = x_cV.max(1), y_cV.max(1)
    max_c, teacher_max_c = max_c.clamp(min=EMPTY_MAX), teacher_max_c.clamp(min=EMPTY_MAX)
    t_cV = (x_cV - max_c.unsqueeze(1)) / scoring.temperature
    s_cV = (y_cV - teacher_max_c.unsqueeze(1)) / scoring.temperature
    f_cV, gap_cV = s_cV.exp(), s_cV - t_cV
    cross_c = _total(t_cV.exp(), -gap_cV) if scoring.divergence.kind == "reverse_kl" else _total(f_cV, gap_cV)
    sums = (first_c, teacher_max_c, f_cV.sum(1), teacher_first_c)
    stats_cK[:, -TEACHER_STATISTICS:-2] = torch.stack([values_c.to(stats_cK.dtype) for values_c in sums], 1)
    stats_cK[:, -1] = cross_c


def _total(weights_cV: Tensor, values_cV: Tensor) -> Tensor:
    """Σ weight · value over the columns with a weight: 0 · inf is 0."""
    return torch.where(weights_cV > 0, weights_cV * values_cV, 0.0).sum(1)


def mixture(logits: Logits, scoring: Scoring, scores: RowScores, sums_R2: Tensor) -> None:
    assert logits.teacher is not None
    assert scoring.divergence is not None
    for index, where, x_cV, _ in _chunks(logits, scoring.rows_R):
        rows = mapped(scores, itemgetter(index))
        logp_cV = _logprob(x_cV, rows.max_R, rows.log_sum_R, scoring.temperature)
        logq_cV = _logprob(logits.teacher[where], rows.teacher_max_R, rows.teacher_log_sum_R, scoring.temperature)
        p_cV, q_cV = logp_cV.exp(), logq_cV.exp()
        logm_cV = _mixture(1 - scoring.divergence.beta, p_cV, scoring.divergence.beta, q_cV).log()
        sums_R2[index, 0] = _total(p_cV, logp_cV - logm_cV)
        sums_R2[index, 1] = _total(q_cV, logq_cV - logm_cV)


def _logprob(x_cV: Tensor, max_c: Tensor | None, log_sum_c: Tensor | None, temperature: float) -> Tensor:
    assert max_c is not None
    assert log_sum_c is not None
    return (x_cV - max_c.unsqueeze(1)) / temperature - log_sum_c.unsqueeze(1)


def _mixture(weight: Tensor | float, p_cV: Tensor, other: Tensor | float, q_cV: Tensor) -> Tensor:
    """Weights round the least positive numbers to 0, and p · log 0 would be infinite."""
    return (weight * p_cV + other * q_cV).clamp(min=torch.finfo(p_cV.dtype).tiny)


def _inner(a_cV: Tensor, b_cV: Tensor) -> Tensor:
    return torch.stack([torch.dot(a_V, b_V) for a_V, b_V in zip(a_cV, b_cV, strict=True)])


def teacher_terms(scoring: Scoring, scores: RowScores, grad_R: Tensor) -> Tensor:
    """Returns [6, R]: constant, slope, factor, the teacher's maximum, and α and γ of m = α e^t + γ e^s.

    The divergence's gradient is e^t · (constant + slope · t) + factor · w, with w = e^s for the forward KL, e^t · s for the
    reverse, and e^t · log m for ``jsd``; t, s and log m are in units of log 2.
    """
    # (p − q), p (log p − log q − KL) and (1 − β) p (log p − log m − KL(p ‖ m)), each times grad / temperature
    assert scoring.divergence is not None
    assert scores.teacher_max_R is not None
    assert scores.teacher_log_sum_R is not None
    kind, beta = scoring.divergence.kind, scoring.divergence.beta
    p_R, q_R = (-scores.log_sum_R).exp(), (-scores.teacher_log_sum_R).exp()
    grad_R = grad_R / scoring.temperature
    constant_R, slope_R, factor_R = grad_R * p_R, torch.zeros_like(p_R), -grad_R * q_R
    if kind != "forward_kl":
        assert scores.gap_R is not None
        scale_R = constant_R if kind == "reverse_kl" else (1 - beta) * constant_R
        other_R = scores.teacher_log_sum_R if kind == "reverse_kl" else 0.0
        constant_R = scale_R * (other_R - scores.log_sum_R - scores.gap_R)
        slope_R, factor_R = scale_R / LOG2_E, -scale_R / LOG2_E
    return torch.stack([constant_R, slope_R, factor_R, scores.teacher_max_R, (1 - beta) * p_R, beta * q_R])


def _further(e_cV: Tensor, y_cV: Tensor, scoring: Scoring, terms_6c: Tensor) -> Tensor:
    assert scoring.divergence is not None
    factor_c1, max_c1, of_student_c1, of_teacher_c1 = terms_6c[2:].unsqueeze(-1).unbind()
    s_cV = (y_cV.to(e_cV.dtype) - max_c1) * (LOG2_E / scoring.temperature)
    if scoring.divergence.kind == "forward_kl":
        return factor_c1 * s_cV.exp2()
    if scoring.divergence.kind == "jsd":
        s_cV = _mixture(of_student_c1, e_cV, of_teacher_c1, s_cV.exp2()).log2()
    return torch.where(e_cV > 0, factor_c1 * e_cV * s_cV, 0.0)


def backward(logits: Logits, scoring: Scoring, scores: RowScores, gradients: Gradients, out_TV: Tensor) -> None:
    """Writes (grad_logprob · (1[label] − p) − grad_entropy · p (log p + H)) / temperature, and the gradient of the divergence;
    ``gradients`` are of rows.
    """
    # As a function of t alone it is e^t · (constant + slope · t), and at_label more in the label's column: one product a logit.
    temperature, grad_entropy_R = scoring.temperature, gradients.entropy
    grad_logprob_R = torch.zeros_like(scores.logprob_R) if gradients.logprob is None else gradients.logprob
    scale_R = (-scores.log_sum_R).exp() / temperature
    constant_R1 = (-grad_logprob_R * scale_R).unsqueeze(1)
    slope_R1 = None
    if grad_entropy_R is not None:
        constant_R1 = constant_R1 - (grad_entropy_R * scale_R * (scores.entropy_R - scores.log_sum_R)).unsqueeze(1)
        slope_R1 = (-grad_entropy_R * scale_R / LOG2_E).unsqueeze(1)  # t is in units of log 2 below
    terms_6R = None if gradients.divergence is None else teacher_terms(scoring, scores, gradients.divergence)
    if terms_6R is not None:
        constant_R1 = constant_R1 + terms_6R[0].unsqueeze(1)
        slope_R1 = (0.0 if slope_R1 is None else slope_R1) + terms_6R[1].unsqueeze(1)
    max_R1, column_R1 = scores.max_R.unsqueeze(1), scoring.labels.column_R.unsqueeze(1)
    at_label_R1 = (grad_logprob_R * scoring.labels.inside_R / temperature).unsqueeze(1)
    for index, where, source_cV, (t_cV, e_cV) in _chunks(logits, scoring.rows_R):
        _exponents(source_cV, max_R1[index], temperature, t_cV)
        torch.exp2(t_cV, out=e_cV)
        further_cV = None
        if terms_6R is not None and logits.teacher is not None:
            further_cV = _further(e_cV, logits.teacher[where], scoring, terms_6R[:, index])
        if slope_R1 is None:
            e_cV.mul_(constant_R1[index])
        else:
            e_cV.mul_(t_cV.mul_(slope_R1[index]).add_(constant_R1[index]))
        if further_cV is not None:
            e_cV.add_(further_cV)
        e_cV.scatter_add_(1, column_R1[index], at_label_R1[index])  # before rounding: scatter into bf16 is slow and inexact
        out_TV[where] = e_cV if isinstance(where, slice) else e_cV.to(out_TV.dtype)


def _exponents(source_cV: Tensor, max_c1: Tensor, temperature: float, out_cV: Tensor) -> None:
    """Writes (x − max)/temperature in units of log 2. Subtracting first keeps large offsets exact."""
    torch.sub(source_cV, max_c1, out=out_cV)
    out_cV.mul_(LOG2_E / temperature).clamp_(min=_FAR_BELOW)


def _chunks(logits: Logits, rows_R: Tensor | None) -> Iterator[tuple[slice, slice | Tensor, Tensor, Tensor]]:
    """Yields places among scored rows and in the logits, logits to compute with, and work [2, c, V]."""
    logits_TV, tensors = logits.student, 2 if logits.teacher is None else 6
    tokens, columns = logits_TV.shape
    dtype, count = torch.promote_types(logits_TV.dtype, torch.float32), tokens if rows_R is None else rows_R.numel()
    budget = _WORKSPACE_BYTES.get(logits_TV.device.type, _WORKSPACE_BYTES_ACCELERATOR)
    size = max(1, min(budget // (tensors * dtype.itemsize * columns), tokens))
    workspace = torch.empty(2, size, columns, dtype=dtype, device=logits_TV.device)
    places = None if rows_R is None else rows_R.cpu()
    for start in range(0, count, size):
        index = slice(start, min(start + size, count))
        where: slice | Tensor = index
        if rows_R is not None and places is not None:
            # Rows without a gap between them are indexed by a slice, which copies nothing.
            first, last = int(places[index.start]), int(places[index.stop - 1])
            where = slice(first, last + 1) if last - first == index.stop - index.start - 1 else rows_R[index]
        work, logits_cV = workspace[:, : index.stop - index.start], logits_TV[where]
        yield index, where, logits_cV if logits_cV.dtype == dtype else work[0].copy_(logits_cV), work


@dataclass(frozen=True)
class RowSweeps:
    forward: Callable[..., None]
    mix: Callable[..., None]
    backward: Callable[..., None]

    def statistics(self, logits: Logits, scoring: Scoring, stats_RK: Tensor) -> None:
        labels = scoring.labels
        if not scoring.columns:  # a shard of padding alone: it must not change the other shards' sums
            stats_RK.zero_()[:, 0] = EMPTY_MAX
            if logits.teacher is not None:
                stats_RK[:, 1 - TEACHER_STATISTICS] = EMPTY_MAX
            return
        self.forward(_true_columns(logits, scoring), scoring, stats_RK)
        # A label of another shard has column 0 here, so that the indexing is valid; its logit is then replaced by 0.
        for column, values_TVp in zip((3, -2), logits, strict=True):
            if values_TVp is not None:
                label_logit_R = values_TVp[scoring.token_R, labels.column_R].to(stats_RK.dtype)
                stats_RK[:, column] = torch.where(labels.inside_R, label_logit_R, 0.0)

    def mixture(self, logits: Logits, scoring: Scoring, scores: RowScores, sums_R2: Tensor) -> None:
        if scoring.columns:
            self.mix(_true_columns(logits, scoring), scoring, scores, sums_R2)
        else:
            sums_R2.zero_()

    def gradient(self, logits: Logits, scoring: Scoring, scores: RowScores, gradients: Gradients, out_TVp: Tensor) -> None:
        rows_R, columns = scoring.rows_R, scoring.columns
        # The sweep writes scored rows and true columns only. The rest is 0 whatever the storage held.
        if rows_R is not None:
            masked_T = torch.ones(scoring.tokens, dtype=torch.bool, device=out_TVp.device).index_fill_(0, rows_R, False)
            out_TVp[masked_T] = 0
        out_TVp[:, columns:] = 0
        if columns:
            of_rows = mapped(gradients, scoring.of_rows)
            self.backward(_true_columns(logits, scoring), scoring, scores, of_rows, out_TVp[:, :columns])


def _true_columns(logits: Logits, scoring: Scoring) -> Logits:
    return mapped(logits, lambda values_TVp: values_TVp[:, : scoring.columns])


IN_TORCH = RowSweeps(forward, mixture, backward)
