"""Digests of weights in flight: what was sent against what arrived, at a fraction of the cost of sending it.

This guards against accidents (a flipped bit, a truncated or misplaced message), not against somebody who forges weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

RUN_WORDS = 512
RUN_BYTES = 8 * RUN_WORDS
_ODD = 0x9E3779B97F4A7C15


def digest(data: Tensor) -> int:
    """64 bits that depend on every byte of a contiguous tensor, on its size, and on the order of its bytes.

    The 64-bit words of each run of 4 KiB are added up, and the sums weighed by odd numbers modulo 2^64: any change of a single
    word changes the result. Words that change places within a run do not. One pass at the speed of the memory.
    """
    raw = data.detach().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()  # words must be aligned
    whole = raw.numel() - raw.numel() % RUN_BYTES
    runs = raw[:whole].view(torch.int64).view(-1, RUN_WORDS).sum(1)
    rest = raw.new_zeros(RUN_BYTES)
    rest[: raw.numel() - whole] = raw[whole:]
    words = torch.cat([runs, rest.view(torch.int64)])
    return (int((words * _weights(words.numel(), words.device)).sum()) + raw.numel() * _ODD) % 2**64


class Tally:
    """Digests by tensor, of a transfer between two ranks that arrives in pieces.

    Both ranks add the same pieces in the same order; then their tallies agree if and only if, up to chance, the bytes do.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._index = {name: at for at, name in enumerate(dict.fromkeys(names))}
        self._values = [0] * len(self._index)
        self._pieces = 0

    def add(self, name: str, piece: int) -> None:
        """Takes the digest of the next piece of tensor ``name`` into account."""
        self._pieces += 1
        at, key = self._index[name], 2 * self._pieces + 1  # pieces that change places do not go unseen
        self._values[at] = (self._values[at] + piece * key) % 2**64

    def as_tensor(self) -> Tensor:
        """The digests, two's complement, one of 64 bits per tensor in the order of first mention: int64 [tensors]."""
        return torch.tensor([value - 2**64 * (value >= 2**63) for value in self._values], dtype=torch.int64)

    def differences(self, other: Tensor) -> list[str]:
        """A sentence for every tensor whose digest differs from that in ``other``, an :meth:`as_tensor` of the sending rank."""
        sent = [value % 2**64 for value in other.tolist()]
        return [
            f"{name!r} (sent {sent[at]:016x}, arrived {self._values[at]:016x})"
            for name, at in self._index.items()
            if sent[at] != self._values[at]
        ]


@lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    odd = torch.arange(1, 2 * count, 2, device=device)
    return odd * (_ODD - 2**64)
