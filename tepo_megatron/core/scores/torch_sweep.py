"""Sweeps over logits in torch, in chunks that fit the cache.

T rows, R scored ones, c rows of a chunk, V ≥ 1 columns without padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tepo_megatron.core.scores.shard import (
    EMPTY_MAX,
    TEACHER_STATISTICS,
    Gradients,
    LocalLabels,
    RowScores,
    Scoring,
    divergence_of,
    outcomes,
)

_LOG2_E = math.log2(math.e)
_FAR_BELOW = -1e4  # stands for −inf in an exponent: 0 · −inf is NaN

_WORKSPACE_BYTES = {"cpu": 768 * 1024}  # fits a second-level cache together with the rows
_WORKSPACE_BYTES_ACCELERATOR = 128 * 1024 * 1024  # where a chunk must be large enough to fill the device
_FEW_ROWS = 8


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def forward(logits_TV: Tensor, scoring: Scoring, stats_RK: Tensor, teacher_TV: Tensor | None = None) -> None:
    """Writes all statistics but the labels' logits."""
    for index, where, source_cV, (t_cV, e_cV) in _chunks(logits_TV, scoring.rows_R, tensors=2 if teacher_TV is None else 6):
        if teacher_TV is not None:
            _teacher_statistics(source_cV, teacher_TV[where].to(source_cV.dtype), scoring, stats_RK[index])
        max_c1 = source_cV.amax(1, keepdim=True).clamp(min=EMPTY_MAX)
        _exponents(source_cV, max_c1, scoring.temperature, t_cV)
        torch.exp2(t_cV, out=e_cV)
        stats_RK[index, 0:1] = max_c1
        stats_RK[index, 1] = e_cV.sum(1)
        if t_cV.device.type == "cpu" and len(t_cV) <= _FEW_ROWS:
            stats_RK[index, 2] = _inner(t_cV, e_cV) / _LOG2_E
            if scoring.entropy_slope:
                stats_RK[index, 5] = _inner(t_cV.mul_(e_cV), e_cV) / _LOG2_E
                stats_RK[index, 4] = _inner(e_cV, e_cV)
            continue
        stats_RK[index, 2] = t_cV.mul_(e_cV).sum(1) / _LOG2_E
        if scoring.entropy_slope:
            stats_RK[index, 5] = t_cV.mul_(e_cV).sum(1) / _LOG2_E
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


def mixture(logits_TV: Tensor, teacher_TV: Tensor, scoring: Scoring, scores: RowScores, sums_R2: Tensor) -> None:
    for index, where, x_cV, _ in _chunks(logits_TV, scoring.rows_R, tensors=6):
        rows = scores.part(index)
        logp_cV = _logprob(x_cV, rows.max_R, rows.log_sum_R, scoring.temperature)
        logq_cV = _logprob(teacher_TV[where], rows.teacher_max_R, rows.teacher_log_sum_R, scoring.temperature)
        p_cV, q_cV = logp_cV.exp(), logq_cV.exp()
        assert scoring.divergence is not None
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
        constant_R, slope_R, factor_R = (
            scale_R * (other_R - scores.log_sum_R - scores.gap_R),
            scale_R / _LOG2_E,
            -scale_R / _LOG2_E,
        )
    return torch.stack([constant_R, slope_R, factor_R, scores.teacher_max_R, (1 - beta) * p_R, beta * q_R])


def _further(e_cV: Tensor, y_cV: Tensor, scoring: Scoring, terms_6c: Tensor) -> Tensor:
    assert scoring.divergence is not None
    factor_c1, max_c1, of_student_c1, of_teacher_c1 = terms_6c[2:].unsqueeze(-1).unbind()
    s_cV = (y_cV.to(e_cV.dtype) - max_c1) * (_LOG2_E / scoring.temperature)
    if scoring.divergence.kind == "forward_kl":
        return factor_c1 * s_cV.exp2()
    if scoring.divergence.kind == "jsd":
        s_cV = _mixture(of_student_c1, e_cV, of_teacher_c1, s_cV.exp2()).log2()
    return torch.where(e_cV > 0, factor_c1 * e_cV * s_cV, 0.0)


def backward(
    logits_TV: Tensor,
    scoring: Scoring,
    scores: RowScores,
    gradients: Gradients,
    out_TV: Tensor,
    teacher_TV: Tensor | None = None,
) -> None:
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
        slope_R1 = (-grad_entropy_R * scale_R / _LOG2_E).unsqueeze(1)  # t is in units of log 2 below
    terms_6R = None if gradients.divergence is None else teacher_terms(scoring, scores, gradients.divergence)
    if terms_6R is not None:
        constant_R1 = constant_R1 + terms_6R[0].unsqueeze(1)
        slope_R1 = (0.0 if slope_R1 is None else slope_R1) + terms_6R[1].unsqueeze(1)
    max_R1, column_R1 = scores.max_R.unsqueeze(1), scoring.labels.column_R.unsqueeze(1)
    at_label_R1 = (grad_logprob_R * scoring.labels.inside_R / temperature).unsqueeze(1)
    for index, where, source_cV, (t_cV, e_cV) in _chunks(logits_TV, scoring.rows_R, tensors=2 if teacher_TV is None else 6):
        _exponents(source_cV, max_R1[index], temperature, t_cV)
        torch.exp2(t_cV, out=e_cV)
        further_cV = None
        if terms_6R is not None and teacher_TV is not None:
            further_cV = _further(e_cV, teacher_TV[where], scoring, terms_6R[:, index])
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
    out_cV.mul_(_LOG2_E / temperature).clamp_(min=_FAR_BELOW)


def _chunks(
    logits_TV: Tensor, rows_R: Tensor | None, *, tensors: int = 2
) -> Iterator[tuple[slice, slice | Tensor, Tensor, Tensor]]:
    """Yields places among scored rows and in the logits, logits to compute with, and work [2, c, V]."""
    tokens, columns = logits_TV.shape
    dtype, count = compute_dtype(logits_TV.dtype), tokens if rows_R is None else rows_R.numel()
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

    def statistics(self, logits_TVp: Tensor, scoring: Scoring, stats_RK: Tensor, teacher_TVp: Tensor | None = None) -> None:
        rows_R, labels, columns = scoring.rows_R, scoring.labels, scoring.columns
        if not columns:  # a shard of padding alone: it must not change the other shards' sums
            stats_RK.zero_()[:, 0] = EMPTY_MAX
            if teacher_TVp is not None:
                stats_RK[:, 1 - TEACHER_STATISTICS] = EMPTY_MAX
            return
        self.forward(logits_TVp[:, :columns], scoring, stats_RK, None if teacher_TVp is None else teacher_TVp[:, :columns])
        row_R = torch.arange(labels.column_R.numel(), device=logits_TVp.device) if rows_R is None else rows_R
        # A label of another shard has column 0 here, so that the indexing is valid; its logit is then replaced by 0.
        for column, values_TVp in ((3, logits_TVp), (-2, teacher_TVp)):
            if values_TVp is not None:
                label_logit_R = values_TVp[row_R, labels.column_R].to(stats_RK.dtype)
                stats_RK[:, column] = torch.where(labels.inside_R, label_logit_R, 0.0)

    def mixture(self, logits_TVp: Tensor, teacher_TVp: Tensor, scoring: Scoring, scores: RowScores, sums_R2: Tensor) -> None:
        columns = scoring.columns
        if columns:
            self.mix(logits_TVp[:, :columns], teacher_TVp[:, :columns], scoring, scores, sums_R2)
        else:
            sums_R2.zero_()

    def gradient(
        self,
        logits_TVp: Tensor,
        scoring: Scoring,
        scores: RowScores,
        gradients: Gradients,
        out_TVp: Tensor,
        teacher_TVp: Tensor | None = None,
    ) -> None:
        rows_R, columns = scoring.rows_R, scoring.columns
        # The sweep writes scored rows and true columns only. The rest is 0 whatever the storage held.
        if rows_R is not None:
            masked_T = torch.ones(scoring.tokens, dtype=torch.bool, device=out_TVp.device).index_fill_(0, rows_R, False)
            out_TVp[masked_T] = 0
        out_TVp[:, columns:] = 0
        if columns:
            teacher_TV = None if teacher_TVp is None else teacher_TVp[:, :columns]
            rows = gradients.map(scoring.of_rows)
            self.backward(logits_TVp[:, :columns], scoring, scores, rows, out_TVp[:, :columns], teacher_TV)


IN_TORCH = RowSweeps(forward, mixture, backward)


class KeptTokens:
    """Scores kept tokens: rows [R, 1 + K], label first, −inf for columns elsewhere. `plan_scoring` refuses a teacher."""

    def mixture(self, *_: object) -> None:
        raise NotImplementedError

    def statistics(self, logits_TVp: Tensor, scoring: Scoring, stats_RK: Tensor, teacher_TVp: Tensor | None = None) -> None:
        if not scoring.count:
            return
        picked_RC, _, inside_RC = _pick(logits_TVp, scoring)
        forward(picked_RC, replace(scoring, rows_R=None), stats_RK)
        stats_RK[:, 3] = torch.where(inside_RC[:, 0], picked_RC[:, 0], 0.0)

    def gradient(
        self,
        logits_TVp: Tensor,
        scoring: Scoring,
        scores: RowScores,
        gradients: Gradients,
        out_TVp: Tensor,
        teacher_TVp: Tensor | None = None,
    ) -> None:
        if not scoring.count:
            out_TVp.zero_()
            return
        picked_RC, column_RC, _ = _pick(logits_TVp, scoring)  # before the gradient may take the logits' place
        labels = LocalLabels(torch.zeros_like(scoring.labels.column_R), scoring.labels.inside_R)
        rows = replace(scoring, rows_R=None, labels=labels)
        backward(picked_RC, rows, scores, gradients.map(scoring.of_rows), picked_RC)
        # Each column is in a row once; a −inf outside this shard adds its gradient, 0, to column 0.
        out_TVp.zero_()
        out_TVp.index_put_((_rows(scoring, logits_TVp), column_RC), picked_RC.to(out_TVp.dtype), accumulate=True)


@dataclass(frozen=True)
class TopK:
    """Adds a teacher's top k to another backend, whose gradient it corrects in their columns, the label's and the first."""

    of_backend: Callable[..., None]
    gradient_of_backend: Callable[..., None]

    def mixture(self, *_: object) -> None:
        raise NotImplementedError

    def statistics(self, logits_TVp: Tensor, scoring: Scoring, stats_RK: Tensor, teacher_TVp: Tensor | None = None) -> None:
        assert scoring.top is not None
        plain, tokens = scoring.without_top, scoring.top.tokens
        whole_RK = stats_RK.new_empty(scoring.count, plain.statistics)
        self.of_backend(logits_TVp, plain, whole_RK)
        stats_RK[:, : plain.statistics] = whole_RK
        picked_RK = logits_TVp[_rows(scoring, logits_TVp), tokens.column_R].to(stats_RK.dtype)
        stats_RK[:, plain.statistics :] = torch.where(tokens.inside_R, picked_RK, 0.0)

    def gradient(
        self,
        logits_TVp: Tensor,
        scoring: Scoring,
        scores: RowScores,
        gradients: Gradients,
        out_TVp: Tensor,
        teacher_TVp: Tensor | None = None,
    ) -> None:
        """∂/∂logit is w − p Σw in a column of the top k and p (w/p of the rest − Σw) in another one: no difference of large
        numbers where the rest is small.
        """
        assert scoring.top is not None
        assert scores.top_logprob_RK is not None
        if gradients.divergence is None or not scoring.count:
            plain = gradients._replace(divergence=None)
            self.gradient_of_backend(logits_TVp, scoring.without_top, scores, plain, out_TVp)
            return
        logp_RO = outcomes(scores.top_logprob_RK)
        pull_RO = divergence_of(logp_RO, outcomes(scoring.top.logprob_RK), scoring.top.divergence)[1]
        grad_R = scoring.of_rows(gradients.divergence).double()
        pull_RO, total_R = grad_R.unsqueeze(1) * pull_RO, grad_R * pull_RO.sum(1)
        elsewhere_R = pull_RO[:, -1] / logp_RO[:, -1].exp()
        column_RC, of_label_RC, of_top_RC, in_top_RC = _corrected(scoring, pull_RO[:, :-1])
        rows_R1 = _rows(scoring, logits_TVp)
        shifted_RC = logits_TVp[rows_R1, column_RC].double() - scores.max_R.double().unsqueeze(1)  # before out is written
        logp_RC = shifted_RC / scoring.temperature - scores.log_sum_R.double().unsqueeze(1)
        of_logprob_R = torch.zeros_like(grad_R) if gradients.logprob is None else scoring.of_rows(gradients.logprob).double()
        whole_T = scoring.to_tokens((of_logprob_R + total_R - elsewhere_R).to(scores.logprob_R.dtype))
        self.gradient_of_backend(logits_TVp, scoring.without_top, scores, Gradients(whole_T, gradients.entropy), out_TVp)
        if not scoring.columns:
            return
        slope_RC = of_logprob_R.unsqueeze(1) * of_label_RC + of_top_RC
        slope_RC -= logp_RC.exp() * (of_logprob_R + total_R).unsqueeze(1)
        slope_RC += torch.where(in_top_RC, 0.0, logp_RC.exp() * elsewhere_R.unsqueeze(1))
        if gradients.entropy is not None:
            above_RC = torch.where(logp_RC.isfinite(), logp_RC.exp() * (logp_RC + scores.entropy_R.unsqueeze(1)), 0.0)
            slope_RC -= scoring.of_rows(gradients.entropy).unsqueeze(1) * above_RC
        out_TVp[rows_R1, column_RC] = (slope_RC / scoring.temperature).to(out_TVp.dtype)


def _corrected(scoring: Scoring, pull_RK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns [R, 2 + K]: columns (the first, the label's, those of the top k), 1 in the label's, a top token's pull, and
    whether it is one. A token of another shard has the first column, with the values of that: repeated columns agree.
    """
    assert scoring.top is not None
    (label_R, inside_R), (top_RK, in_shard_RK) = scoring.labels, scoring.top.tokens
    first_R2 = torch.stack([torch.zeros_like(label_R), label_R], 1)
    same_R2K = (first_R2.unsqueeze(2) == top_RK.unsqueeze(1)) & in_shard_RK.unsqueeze(1)
    pull_R2, in_top_R2 = (same_R2K * pull_RK.unsqueeze(1)).sum(2), same_R2K.any(2)
    column_RC = torch.cat([first_R2, top_RK], 1)
    of_top_RC = torch.cat([pull_R2, torch.where(in_shard_RK, pull_RK, pull_R2[:, :1])], 1)
    in_top_RC = torch.cat([in_top_R2, in_shard_RK | in_top_R2[:, :1]], 1)
    return column_RC, (column_RC == label_R.unsqueeze(1)) & inside_R.unsqueeze(1), of_top_RC, in_top_RC


def _pick(logits_TVp: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor, Tensor]:
    assert scoring.kept_tokens is not None
    column_RC = torch.cat([scoring.labels.column_R.unsqueeze(1), scoring.kept_tokens.column_R], 1)
    inside_RC = torch.cat([scoring.labels.inside_R.unsqueeze(1), scoring.kept_tokens.inside_R], 1)
    values_RC = logits_TVp[_rows(scoring, logits_TVp), column_RC].to(compute_dtype(logits_TVp.dtype))
    return values_RC.masked_fill(~inside_RC, -torch.inf), column_RC, inside_RC


def _rows(scoring: Scoring, logits_TVp: Tensor) -> Tensor:
    rows_R = torch.arange(scoring.count, device=logits_TVp.device) if scoring.rows_R is None else scoring.rows_R
    return rows_R.unsqueeze(1)
