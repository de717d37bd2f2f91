"""A step's batch divided into the mini-batches of its optimizer steps, and which of its sequences are recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import torch

from tepo_megatron.config import LogConfig
from tepo_megatron.core.types import Batch


def minibatches(batch: Batch, count: int, *, seed: int, step: int) -> Iterator[Batch]:
    """``count`` mini-batches of nearly equal numbers of sequences, in an order that depends on (seed, step) alone.

    Every rank draws the same order. Each sequence with a token in the loss mask is in exactly one mini-batch, and others
    (``rollout.truncated: mask``) in none: they have given their reward to their group's advantages.
    """
    for part in members(trained_sequences(batch), count, seed=seed, step=step):
        yield batch.select(part)


def members(sequences: int | Sequence[int], count: int, *, seed: int, step: int) -> list[list[int]]:
    """Which of a step's sequences each mini-batch has, in its order. ``sequences``: those that are trained on, or how many."""
    trained = torch.tensor(range(sequences) if isinstance(sequences, int) else sequences, dtype=torch.int64)
    generator = torch.Generator().manual_seed(derive_seed(seed, step, "minibatches"))
    order = torch.randperm(trained.numel(), generator=generator)
    return [part.tolist() for part in trained[order].tensor_split(count)]


def trained_sequences(batch: Batch) -> list[int]:
    """The sequences with a token in the loss mask."""
    found: list[int] = batch.sequence_index_T[batch.loss_mask_T].unique().tolist()
    return found


def mark_recorded(batch: Batch, log: LogConfig, step: int) -> Batch:
    """The step's batch with ``recorded_S``, where the step is recorded; else as it is. ``step``: as its row is numbered.

    Pure: every rank has the same batch, and marks the same sequences.
    """
    if not log.records_tokens(step):
        return batch
    recorded = recorded_places(batch.groups_S.tolist(), log.token_samples)
    numbers_S = torch.full_like(batch.groups_S, -1)
    numbers_S[recorded] = torch.tensor(recorded, dtype=numbers_S.dtype, device=numbers_S.device)
    return batch.with_(recorded_S=numbers_S)


def recorded_places(groups: Sequence[int], count: int) -> list[int]:
    """Which of a step's sequences are of its first ``count`` groups; ``groups`` has the group of each."""
    chosen = set(sorted(set(groups))[:count])
    return [place for place, group in enumerate(groups) if group in chosen]


def derive_seed(seed: int, step: int, purpose: str) -> int:
    """A 31-bit seed of its own for each use and step, so that a resumed run draws what the first one would have drawn."""
    return int.from_bytes(blake2b(f"{seed}/{step}/{purpose}".encode(), digest_size=4).digest()) & 0x7FFFFFFF
