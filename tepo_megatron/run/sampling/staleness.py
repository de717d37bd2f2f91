"""The age, in versions, of the weights that drew each token of a step. Rank 0 only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.core.types import Batch
from tepo_megatron.run.step.minibatches import members


def most_stale(config: RunConfig, step: int) -> int:
    train = config.train
    if train.schedule == "sync":
        return step if config.rollout.oversample > 1 else 0  # groups carried over may be of any age
    return train.max_staleness if train.stale == "drop" else step


def token_ages(rollout: Rollout, step: int) -> NDArray[np.int64]:
    """An environment's tokens have the age of those before them."""
    starts = [start for start, _ in rollout.versions]
    ages = [step - version.step for _, version in rollout.versions]
    return np.repeat(ages, np.diff([*starts, len(rollout.response_ids)]))


def version_figures(rollouts: Sequence[Rollout], step: int) -> dict[str, float]:
    steps = [version.step for rollout in rollouts for _, version in rollout.versions]
    ages = np.concatenate([_model_ages(rollout, step) for rollout in rollouts])
    return {
        "weights_version/min": float(min(steps)),
        "weights_version/max": float(max(steps)),
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/versions": sum(len(rollout.versions) for rollout in rollouts) / len(rollouts),
    }


def _model_ages(rollout: Rollout, step: int) -> NDArray[np.int64]:
    ages = token_ages(rollout, step)
    return ages if rollout.loss_mask is None else ages[rollout.loss_mask]


def part_ages(
    rollouts: Sequence[Rollout], parts: Sequence[Batch], *, seed: int, step: int, trained: Sequence[int] | None = None
) -> list[Tensor]:
    """int64 [T] per mini-batch; −1 for tokens that are not the model's response.

    ``rollouts``: the whole step in packing order. ``trained``: indices of those in the mini-batches; None: all.
    """
    ages = []
    sequences = len(rollouts) if trained is None else trained
    for part, chosen in zip(parts, members(sequences, len(parts), seed=seed, step=step), strict=True):
        ages_T = torch.full_like(part.labels_T, -1)
        for first, index in zip(part.cu_seqlens.tolist(), chosen, strict=False):
            first += len(rollouts[index].prompt_ids) - 1  # the last prompt token's label is the first of the response
            response_ages = torch.from_numpy(token_ages(rollouts[index], step)).to(ages_T)
            ages_T[first : first + response_ages.numel()] = response_ages
        ages_T[~part.loss_mask_T] = -1  # no weights drew an environment's tokens
        ages.append(ages_T)
    return ages


def mismatch_by_age(parts: Sequence[Batch], ages: Sequence[Tensor]) -> dict[str, float]:
    """``staleness/kl_0``, …: KL(π_sampler‖π_old) by k3 over the tokens of each age with a finite log-prob of the trainer."""
    gaps, olds = [], []
    for part, ages_T in zip(parts, ages, strict=True):
        assert part.old_logprobs_T is not None
        gap_T = (part.old_logprobs_T - part.sampler_logprobs_T).double()
        counted_T = part.loss_mask_T & gap_T.isfinite()
        gaps.append(gap_T[counted_T])
        olds.append(ages_T[counted_T])
    gap, age = torch.cat(gaps), torch.cat(olds)
    kl = torch.expm1(gap) - gap
    return {f"staleness/kl_{value}": float(kl[age == value].mean()) for value in age.unique().tolist()}
