"""Divides a step's batch into mini-batches, and chooses recorded sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import torch

from tepo_megatron.config import LogConfig
from tepo_megatron.core.types import Batch


def minibatches(batch: Batch, count: int, *, seed: int, step: int) -> Iterator[Batch]:
    """Mini-batches of nearly equal numbers of sequences, ordered by (seed, step) alone, the same on every rank. Sequences
    without a token in the loss mask are left out.
    """
    for part in members(trained_sequences(batch), count, seed=seed, step=step):
        yield batch.select(part)


def members(sequences: int | Sequence[int], count: int, *, seed: int, step: int) -> list[list[int]]:
    trained = torch.tensor(range(sequences) if isinstance(sequences, int) else sequences, dtype=torch.int64)
    generator = torch.Generator().manual_seed(derive_seed(seed, step, "minibatches"))
    order = torch.randperm(trained.numel(), generator=generator)
    return [part.tolist() for part in trained[order].tensor_split(count)]


def trained_sequences(batch: Batch) -> list[int]:
    indices: list[int] = batch.sequence_index_T[batch.loss_mask_T].unique().tolist()
    return indices


def mark_recorded(batch: Batch, log: LogConfig, step: int) -> Batch:
    """Adds ``recorded_S`` if the step (the number of its row) is recorded; the same on every rank."""
    if not log.records_tokens(step):
        return batch
    recorded = recorded_places(batch.groups_S.tolist(), log.token_samples)
    numbers_S = torch.full_like(batch.groups_S, -1)
    numbers_S[recorded] = torch.tensor(recorded, dtype=numbers_S.dtype, device=numbers_S.device)
    return batch.with_(recorded_S=numbers_S)


def recorded_places(groups: Sequence[int], count: int) -> list[int]:
    """Indices of the sequences in the first ``count`` groups; ``groups``: the group of each sequence."""
    chosen = set(sorted(set(groups))[:count])
    return [place for place, group in enumerate(groups) if group in chosen]


def derive_seed(seed: int, step: int, purpose: str) -> int:
    """Returns 31 bits, the same in a resumed run."""
    return int.from_bytes(blake2b(f"{seed}/{step}/{purpose}".encode(), digest_size=4).digest()) & 0x7FFFFFFF
