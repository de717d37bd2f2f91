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


def digest(data: Tensor) -> Tensor:
    """64 bits that depend on every byte of a contiguous tensor, on its size, and on the order of its bytes.

    Returns an int64 scalar on the device of ``data``, which is not waited for. The 64-bit words of each run of 4 KiB are added
    up, and the sums weighed by odd numbers modulo 2^64: any change of a single word changes the result. Words that change
    places within a run do not. One pass at the speed of the memory.
    """
    raw = data.detach().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()  # words must be aligned
    whole = raw.numel() - raw.numel() % RUN_BYTES
    runs = raw[:whole].view(torch.int64).view(-1, RUN_WORDS).sum(1)
    rest = raw.new_zeros(RUN_BYTES)
    rest[: raw.numel() - whole] = raw[whole:]
    words = torch.cat([runs, rest.view(torch.int64)])
    return (words * _weights(words.numel(), words.device)).sum() + _signed(raw.numel() * _ODD)


class Tally:
    """Digests by tensor, of a transfer between two ranks that arrives in pieces.

    Both ranks add the same pieces in the same order; then their tallies agree if and only if, up to chance, the bytes do.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._index = {name: at for at, name in enumerate(dict.fromkeys(names))}
        self._added: list[tuple[int, Tensor]] = []

    def __len__(self) -> int:
        """How many tensors there are."""
        return len(self._index)

    def add(self, name: str, piece: Tensor) -> None:
        """Takes the digest of the next piece of tensor ``name`` into account. It may still be on its way on a device."""
        self._added.append((self._index[name], piece))

    def as_tensor(self) -> Tensor:
        """The digests, two's complement, one of 64 bits per tensor in the order of first mention: int64 [tensors], on the CPU.

        Waits for the device, once.
        """
        total = torch.zeros(len(self._index), dtype=torch.int64)
        if not self._added:
            return total
        index, pieces = zip(*self._added, strict=True)
        keys = torch.arange(3, 2 * len(pieces) + 2, 2)  # pieces that change places do not go unseen
        return total.index_add_(0, torch.tensor(index), torch.stack(pieces).cpu() * keys)

    def differences(self, other: Tensor) -> list[str]:
        """A sentence for every tensor whose digest differs from that in ``other``, an :meth:`as_tensor` of the sending rank."""
        sent, arrived = other.tolist(), self.as_tensor().tolist()
        return [
            f"{name!r} (sent {sent[at] % 2**64:016x}, arrived {arrived[at] % 2**64:016x})"
            for name, at in self._index.items()
            if sent[at] != arrived[at]
        ]


def _signed(value: int) -> int:
    """The same 64 bits in two's complement."""
    value %= 2**64
    return value - 2**64 * (value >= 2**63)


@lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    odd = torch.arange(1, 2 * count, 2, device=device)
    return odd * (_ODD - 2**64)
