"""One row of metrics from a step's batch and its optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.core.types import Batch

if TYPE_CHECKING:
    from tepo_megatron.trainer.protocol import UpdateResult


def summarize(batch: Batch, updates: Sequence[UpdateResult]) -> dict[str, float]:
    """Figures of a step's rollouts and, over its mini-batches, of the objective.

    Means are over tokens (or whatever a metric counts), never means of means; the gradient norm is the mean over optimizer
    steps. Skipped steps only count in ``update/skipped``; if all were, loss and norm are NaN.
    """
    lr = updates[-1].lr
    count_skipped = sum(bool(update.skipped) for update in updates)
    updates = [update for update in updates if not update.skipped]
    row = {**_rollout_figures(batch), "update/skipped": float(count_skipped), "lr": lr, "loss": math.nan, "grad_norm": math.nan}
    if not updates:
        return row
    for name in updates[0].sums:
        total = sum(update.sums[name][0] for update in updates)
        count = sum(update.sums[name][1] for update in updates)
        row[name] = total / count if count else 0.0
    for name in updates[0].extrema:
        pick = max if name.endswith("/max") else min
        row[name] = pick(update.extrema[name] for update in updates)
    row["loss"] = sum(update.loss for update in updates) / len(updates)
    row["grad_norm"] = sum(update.grad_norm for update in updates) / len(updates)
    return row


def _rollout_figures(batch: Batch) -> dict[str, float]:
    responses = int(batch.loss_mask_T.sum())
    return {
        "reward/mean": float(batch.rewards_S.mean()),
        "reward/std": float(batch.rewards_S.std(unbiased=False)),
        "response_len/mean": responses / batch.num_sequences,
        "response_tokens": responses,
        "groups/zero_variance": _zero_variance_fraction(batch),
        **_sampling_figures(batch),
    }


def _sampling_figures(batch: Batch) -> dict[str, float]:
    if batch.sampling_mask_T is None:
        return {}
    kept = 1 + batch.sampling_mask_T.counts[batch.loss_mask_T.cpu().numpy()]
    return {"sampling/kept_mean": float(kept.mean()), "sampling/kept_max": float(kept.max())} if kept.size else {}


def _zero_variance_fraction(batch: Batch) -> float:
    groups, at = batch.groups_S.unique(return_inverse=True)
    highest = torch.full((groups.numel(),), -torch.inf, device=at.device).scatter_reduce(0, at, batch.rewards_S, "amax")
    lowest = torch.full((groups.numel(),), torch.inf, device=at.device).scatter_reduce(0, at, batch.rewards_S, "amin")
    return float((highest == lowest).float().mean())


def source_figures(rollouts: Sequence[Rollout], problems: Mapping[str, Problem]) -> dict[str, float]:
    """Source → its share of the step's groups, and its mean reward. Empty for a single source without a name."""
    names = sorted({problem.source for problem in problems.values()} - {""})
    source_of = {
        rollout.problem_id: problems[rollout.problem_id].source for rollout in rollouts if rollout.problem_id in problems
    }
    groups = {rollout.group: source_of.get(rollout.problem_id) for rollout in rollouts}
    figures: dict[str, float] = {}
    for name in names:
        rewards = [each.reward for each in rollouts if source_of.get(each.problem_id) == name and each.reward is not None]
        figures[f"source/{name}/share"] = list(groups.values()).count(name) / len(groups) if groups else 0.0
        figures |= {f"source/{name}/reward": fmean(rewards)} if rewards else {}
    return figures
