"""Sampling masks on their way from rollouts to every rank: ``Batch.sampling_mask_T``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tepo_megatron.core.rollout import Rollout
from tepo_megatron.core.sampling_mask import SamplingMask

NONE = -1
"""The size of a mask that was not recorded."""

_PIECE = 2**26
"""Numbers that lie on a GPU at once while they are sent."""


def pack_masks(rollouts: Sequence[Rollout]) -> SamplingMask | None:
    """Packs the masks of all rollouts: that of a response token at the token before it, whose label it is; None where none of
    them was recorded.

    Raises ValueError, naming the rollout, where one is of another length than its response, or some have one and some not.
    """
    if all(rollout.sampling_mask is None for rollout in rollouts):
        return None
    parts = []
    for rollout in rollouts:
        found, tokens = rollout.sampling_mask, rollout.response_ids.size
        if found is None or len(found) != tokens:
            has = "none" if found is None else f"one of {len(found)}"
            raise ValueError(
                f"rollout of problem {rollout.problem_id} should have a sampling mask of {tokens} tokens, but has {has}; it is "
                "of another response, or of a run without top_k"
            )
        parts += [SamplingMask.empty(rollout.prompt_ids.size - 1), found, SamplingMask.empty(1)]
    return SamplingMask.joined(parts)


def check_masks(rollouts: Sequence[Rollout]) -> None:
    """Raises ValueError, naming the rollout, where it is not known among which tokens its own were drawn."""
    for rollout in rollouts:
        if rollout.sampling_mask is None:
            raise ValueError(
                f"rollout of problem {rollout.problem_id} has no sampling mask, but rollout.sampling.top_k says that its "
                "tokens were drawn from a part of the vocabulary; record the step again with these settings, or leave top_k out"
            )


def size_of(mask: SamplingMask | None) -> int:
    """How many tokens it names; ``NONE`` for none."""
    return NONE if mask is None else mask.ids.size


def broadcast_mask(mask: SamplingMask | None, tokens: int, size: int, device: torch.device) -> SamplingMask | None:
    """Sends rank 0's mask of ``tokens`` tokens, which names ``size``, to every rank's host memory, through ``device``. Every
    rank calls; only rank 0's first argument is read.
    """
    if size == NONE:
        return None
    flat = torch.empty(tokens + size, dtype=torch.int32)
    if mask is not None:
        flat = torch.cat([torch.tensor(mask.counts), torch.tensor(mask.ids)])
    for piece in flat.split(_PIECE):
        sent = piece.to(device)
        dist.broadcast(sent, src=0)
        if sent.data_ptr() != piece.data_ptr():
            piece.copy_(sent)
    numbers = flat.numpy()
    return SamplingMask(numbers[:tokens], numbers[tokens:])
