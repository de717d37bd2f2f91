"""Figures of a step's episodes, for its row of metrics. Rank 0 only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tepo_megatron.core.types import Rollout
from tepo_megatron.tasks.environments.pool import EpisodePool


def episode_figures(rollouts: Sequence[Rollout], pool: object) -> dict[str, float]:
    """Turns and the environment's tokens in the step's responses, and what ``pool`` has counted since the last row. Empty where
    the run plays no episodes.
    """
    if not isinstance(pool, EpisodePool) and all(rollout.loss_mask is None for rollout in rollouts):
        return {}
    figures = {
        "environment/turns": float(np.mean([_turns(rollout) for rollout in rollouts])),
        "environment/tokens": float(np.mean([rollout.response_ids.size - rollout.model_tokens for rollout in rollouts])),
    }
    return figures | (pool.take_figures() if isinstance(pool, EpisodePool) else {})


def _turns(rollout: Rollout) -> int:
    """Runs of the model's tokens; turns between which the environment said nothing are one."""
    if rollout.loss_mask is None:
        return 1
    return int(np.count_nonzero(np.diff(rollout.loss_mask.astype(np.int8), prepend=0) == 1))
