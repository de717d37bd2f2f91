"""A fingerprint of weights: 64 bits that do not depend on how the model is split over ranks, for ``WeightsVersion.digest``.

It does not protect against somebody who forges weights. For the check of what travels see ``bridge.transfer.verification``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from tepo_megatron.weights.geometry import Shard

_CHUNK = 2**20
"""Number of elements that are widened to 64 bits at once."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64)


BLOCK_WORDS = 512

BLOCK_BYTES = 8 * BLOCK_WORDS

_ODD = 0x9E3779B97F4A7C15


def fingerprint(shards: Iterable[Shard], params: Mapping[str, Tensor]) -> int:
    """Returns the fingerprint of the parts of Hugging Face tensors that ``shards`` locate in ``params``, in their dtype there.

    The parameters are all on one device. The fingerprint is the sum over all elements, modulo 2^64, of the element's bits times
    an odd number that its tensor and its index in the tensor determine. Any changed element therefore changes the result, and
    the results of parts that cover the model once add up to the fingerprint of the whole.
    """
    keys, sums = [], []
    for shard in shards:
        part = params[shard.param].detach()[shard.at.slices]
        keys.append(_tensor_key(shard.tensor))
        sums.append(_weighted_sum(part, shard.box.start))
    if not sums:
        return 0
    # One read for all sums: each read from a GPU waits for it. Python multiplies: tensor keys are unsigned.
    return sum(key * value for key, value in zip(keys, torch.stack(sums).tolist(), strict=True)) % 2**64


def _weighted_sum(part: Tensor, start: Sequence[int]) -> Tensor:
    """Returns the weighted sum of one part, which begins at ``start`` of its tensor: int64 [], on the part's device."""
    keys = [_keys(dim, first, part.shape[dim], part.device) for dim, first in enumerate(start)]
    rows = max(1, _CHUNK // max(1, part[0].numel()))
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for chunk, row_keys in zip(part.split(rows), keys[0].split(rows), strict=True):
        values = chunk.contiguous().view(_INTEGERS[part.element_size()]).long()
        for inner in reversed(keys[1:]):
            # int64 products and sums wrap around, which is the arithmetic modulo 2^64 that is wanted.
            values = (values * inner).sum(-1)
        total += (values * row_keys).sum()
    return total


def _keys(dim: int, first: int, count: int, device: torch.device) -> Tensor:
    """Returns pseudo-random odd numbers for ``count`` indices of a dimension from ``first`` on: int64 [count]."""
    # Mixing as in SplitMix64. The keys are made odd: an odd factor has an inverse modulo 2^64 and loses no change of a value.
    mixed = (torch.arange(first, first + count, device=device) + (dim << 40)) * _MIX[0]
    mixed = (mixed ^ (mixed >> 31)) * _MIX[1]
    return (mixed ^ (mixed >> 29)) | 1


def _tensor_key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) | 1


def digest(data: Tensor) -> Tensor:
    """Returns 64 bits that depend on every byte of a contiguous tensor, on its size, and on the order of its blocks.

    The result is an int64 scalar on the device of ``data``, which is not waited for. The 64-bit words of each block of 4 KiB
    are added up, and the sums are multiplied by different odd numbers and added modulo 2^64. A change of a single word always
    changes the result; words that change places within a block do not. This takes one pass at the speed of the memory.
    """
    raw = data.detach().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()  # words must be aligned
    # int64 sums and products wrap around, which is arithmetic modulo 2^64. Odd factors have inverses there: they lose no bit.
    whole = raw.numel() - raw.numel() % BLOCK_BYTES
    blocks = raw[:whole].view(torch.int64).view(-1, BLOCK_WORDS).sum(1)
    rest = raw.new_zeros(BLOCK_BYTES)
    rest[: raw.numel() - whole] = raw[whole:]
    words = torch.cat([blocks, rest.view(torch.int64)])
    return (words * _weights(words.numel(), words.device)).sum() + _signed(raw.numel() * _ODD)


class TensorDigests:
    """The digests of the tensors that one rank sends to another, each added up from the digests of its segments.

    Both ranks add the same segments in the same order; then their digests agree if and only if, up to chance, the bytes do.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._index = {name: at for at, name in enumerate(dict.fromkeys(names))}
        self._added: list[tuple[int, Tensor]] = []

    def __len__(self) -> int:
        """Returns the number of tensors."""
        return len(self._index)

    def add(self, name: str, value: Tensor) -> None:
        """Adds the digest of the next segment of tensor ``name``. A device may not have computed it yet."""
        self._added.append((self._index[name], value))

    def as_tensor(self) -> Tensor:
        """Returns the digests, one for each tensor in the order of its first mention: int64 [tensors], on the CPU.

        It waits for the device once.
        """
        total = torch.zeros(len(self._index), dtype=torch.int64)
        if not self._added:
            return total
        index, values = zip(*self._added, strict=True)
        # A different odd number for each segment: two that change places change the sum.
        keys = torch.arange(3, 2 * len(values) + 2, 2)
        return total.index_add_(0, torch.tensor(index), torch.stack(values).cpu() * keys)

    def differences(self, other: Tensor) -> list[str]:
        """Returns a sentence for every tensor whose digest differs from ``other``, the sending rank's :meth:`as_tensor`."""
        sent, arrived = other.tolist(), self.as_tensor().tolist()
        return [
            f"{name!r} (sent {sent[at] % 2**64:016x}, arrived {arrived[at] % 2**64:016x})"
            for name, at in self._index.items()
            if sent[at] != arrived[at]
        ]


def _signed(value: int) -> int:
    """Returns the same 64 bits as a signed number, in two's complement."""
    value %= 2**64
    return value - 2**64 * (value >= 2**63)


@lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    odd = torch.arange(1, 2 * count, 2, device=device)
    return odd * (_ODD - 2**64)
