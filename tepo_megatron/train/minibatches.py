"""A step's batch divided into the mini-batches of its optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import torch

from tepo_megatron.types import Batch


def minibatches(batch: Batch, count: int, *, seed: int, step: int) -> Iterator[Batch]:
    """``count`` mini-batches of nearly equal numbers of sequences, in an order that depends on (seed, step) alone.

    Every rank draws the same order. Each sequence is in exactly one mini-batch.
    """
    for part in members(batch.num_sequences, count, seed=seed, step=step):
        yield batch.select(part)


def members(sequences: int, count: int, *, seed: int, step: int) -> list[list[int]]:
    """Which of a step's sequences each mini-batch has, in its order."""
    generator = torch.Generator().manual_seed(derive_seed(seed, step, "minibatches"))
    order = torch.randperm(sequences, generator=generator)
    return [part.tolist() for part in order.tensor_split(count)]


def derive_seed(seed: int, step: int, purpose: str) -> int:
    """A 31-bit seed of its own for each use and step, so that a resumed run draws what the first one would have drawn."""
    return int.from_bytes(blake2b(f"{seed}/{step}/{purpose}".encode(), digest_size=4).digest()) & 0x7FFFFFFF
