"""Extends sweeps over scored rows and true columns to a whole shard: labels, masked rows and padding are done in torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tepo_megatron.core.scores.combine import EMPTY_MAX, RowScores
from tepo_megatron.core.scores.shard import LocalLabels, Scoring, of_rows


class Sweep(Protocol):
    """The two functions of `sweep`, which say what they read and write, or of another module that does the same."""

    def forward(self, logits_TV: Tensor, rows_R: Tensor | None, temperature: float, stats_RK: Tensor) -> None: ...

    def backward(
        self,
        logits_TV: Tensor,
        rows_R: Tensor | None,
        temperature: float,
        scores: RowScores,
        labels: LocalLabels,
        grad_logprob_R: Tensor,
        grad_entropy_R: Tensor | None,
        out_TV: Tensor,
    ) -> None: ...


@dataclass(frozen=True)
class RowSweeps:
    """A `Backend` made from a `Sweep`."""

    sweep: Sweep

    def statistics(self, logits_TVp: Tensor, scoring: Scoring, stats_RK: Tensor) -> None:
        rows_R, labels = scoring.rows_R, scoring.labels
        if not scoring.columns:  # a shard of padding alone: it must not change the other shards' sums
            stats_RK.zero_()[:, 0] = EMPTY_MAX
            return
        self.sweep.forward(logits_TVp[:, : scoring.columns], rows_R, scoring.temperature, stats_RK)
        row_R = torch.arange(labels.column_R.numel(), device=logits_TVp.device) if rows_R is None else rows_R
        # A label of another shard has column 0 here, so that the indexing is valid; its logit is then replaced by 0.
        label_logit_R = logits_TVp[row_R, labels.column_R].to(stats_RK.dtype)
        stats_RK[:, 3] = torch.where(labels.inside_R, label_logit_R, 0.0)

    def gradient(
        self,
        logits_TVp: Tensor,
        scoring: Scoring,
        scores: RowScores,
        grad_logprob_T: Tensor | None,
        grad_entropy_T: Tensor | None,
        out_TVp: Tensor,
    ) -> None:
        rows_R, columns = scoring.rows_R, scoring.columns
        # The sweep writes scored rows and true columns only. The rest is 0 whatever the storage held.
        if rows_R is not None:
            masked_T = torch.ones(scoring.tokens, dtype=torch.bool, device=out_TVp.device).index_fill_(0, rows_R, False)
            out_TVp[masked_T] = 0
        out_TVp[:, columns:] = 0
        if not columns:
            return
        grad_logprob_R = torch.zeros_like(scores.logprob_R) if grad_logprob_T is None else of_rows(grad_logprob_T, scoring)
        grad_entropy_R = None if grad_entropy_T is None else of_rows(grad_entropy_T, scoring)
        self.sweep.backward(
            logits_TVp[:, :columns],
            rows_R,
            scoring.temperature,
            scores,
            scoring.labels,
            grad_logprob_R,
            grad_entropy_R,
            out_TVp[:, :columns],
        )
