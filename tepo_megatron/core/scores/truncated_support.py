"""Scores over the tokens of a sampler's mask: rows [R, 1 + K], label first, −inf for columns of another shard."""

from __future__ import annotations

import torch
from torch import Tensor

from tepo_megatron.core.scores import torch_sweep as sweep
from tepo_megatron.core.scores.combine import RowScores
from tepo_megatron.core.scores.shard import LocalLabels, Scoring, of_rows


def statistics(logits_TVp: Tensor, scoring: Scoring, stats_RK: Tensor) -> None:
    if not scoring.count:
        return
    picked_RC, _, inside_RC = _pick(logits_TVp, scoring)
    sweep.forward(picked_RC, None, scoring.temperature, stats_RK)
    stats_RK[:, 3] = torch.where(inside_RC[:, 0], picked_RC[:, 0], 0.0)


def gradient(
    logits_TVp: Tensor,
    scoring: Scoring,
    scores: RowScores,
    grad_logprob_T: Tensor | None,
    grad_entropy_T: Tensor | None,
    out_TVp: Tensor,
) -> None:
    """Is zero except in the columns of kept tokens."""
    if not scoring.count:
        out_TVp.zero_()
        return
    picked_RC, column_RC, _ = _pick(logits_TVp, scoring)  # before the gradient may take the logits' place
    grad_logprob_R = torch.zeros_like(scores.logprob_R) if grad_logprob_T is None else of_rows(grad_logprob_T, scoring)
    grad_entropy_R = None if grad_entropy_T is None else of_rows(grad_entropy_T, scoring)
    labels = LocalLabels(torch.zeros_like(scoring.labels.column_R), scoring.labels.inside_R)
    sweep.backward(picked_RC, None, scoring.temperature, scores, labels, grad_logprob_R, grad_entropy_R, picked_RC)
    # Each column is in a row once; a −inf outside this shard adds its gradient, 0, to column 0.
    out_TVp.zero_()
    out_TVp.index_put_((_rows(scoring, logits_TVp), column_RC), picked_RC.to(out_TVp.dtype), accumulate=True)


def _pick(logits_TVp: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logits [R, 1 + K], their columns, and whether they are inside this shard."""
    assert scoring.kept is not None
    column_RC = torch.cat([scoring.labels.column_R.unsqueeze(1), scoring.kept.column_RK], 1)
    inside_RC = torch.cat([scoring.labels.inside_R.unsqueeze(1), scoring.kept.inside_RK], 1)
    values_RC = logits_TVp[_rows(scoring, logits_TVp), column_RC].to(sweep.compute_dtype(logits_TVp.dtype))
    return values_RC.masked_fill(~inside_RC, -torch.inf), column_RC, inside_RC


def _rows(scoring: Scoring, logits_TVp: Tensor) -> Tensor:
    rows_R = torch.arange(scoring.count, device=logits_TVp.device) if scoring.rows_R is None else scoring.rows_R
    return rows_R.unsqueeze(1)
