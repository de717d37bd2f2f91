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
    generator = torch.Generator().manual_seed(derive_seed(seed, step, "minibatches"))
    order = torch.randperm(batch.num_sequences, generator=generator)
    for part in order.tensor_split(count):
        yield batch.select(part.tolist())


def derive_seed(seed: int, step: int, purpose: str) -> int:
    """A 31-bit seed of its own for each use and step, so that a resumed run draws what the first one would have drawn."""
    return int.from_bytes(blake2b(f"{seed}/{step}/{purpose}".encode(), digest_size=4).digest()) & 0x7FFFFFFF
