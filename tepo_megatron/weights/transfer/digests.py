"""Digests of weights and of transferred bytes, against accidents, not forgery."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from tepo_megatron.weights.geometry import Shard

_CHUNK = 2**20

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64)

_BLOCK_WORDS = 512

BLOCK_BYTES = 8 * _BLOCK_WORDS

_ODD = 0x9E3779B97F4A7C15


def fingerprint(shards: Iterable[Shard], params: Mapping[str, Tensor]) -> int:
    """Returns 64 bits; all ``params`` are on one device.

    Sums bits times odd numbers from tensor and index, modulo 2^64: parts that cover the model once add up to the whole.
    """
    keys, sums = [], []
    for shard in shards:
        part = params[shard.param].detach()[shard.param_box.slices]
        keys.append(int.from_bytes(hashlib.blake2b(shard.tensor.encode(), digest_size=8).digest()) | 1)
        sums.append(_weighted_sum(part, shard.box.start))
    if not sums:
        return 0
    # One read for all sums: each read from a GPU waits for it. Python multiplies: tensor keys are unsigned.
    return sum(key * value for key, value in zip(keys, torch.stack(sums).tolist(), strict=True)) % 2**64


def _weighted_sum(part: Tensor, start: Sequence[int]) -> Tensor:
    keys = [_keys(dim, first, part.shape[dim], part.device) for dim, first in enumerate(start)]
    rows = max(1, _CHUNK // max(1, part[0].numel()))
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for chunk, row_keys in zip(part.split(rows), keys[0].split(rows), strict=True):
        values = chunk.contiguous().view(_INTEGERS[part.element_size()]).long()
        for inner in reversed(keys[1:]):
            # int64 products and sums wrap around, which is arithmetic modulo 2^64.
            values = (values * inner).sum(-1)
        total += (values * row_keys).sum()
    return total


def _keys(dim: int, first: int, count: int, device: torch.device) -> Tensor:
    # Mixing as in SplitMix64. The keys are made odd: an odd factor has an inverse modulo 2^64 and loses no change of a value.
    mixed = (torch.arange(first, first + count, device=device) + (dim << 40)) * _MIX[0]
    mixed = (mixed ^ (mixed >> 31)) * _MIX[1]
    return (mixed ^ (mixed >> 29)) | 1


def digest(data: Tensor) -> Tensor:
    """Returns int64 [] on the tensor's device, without waiting for it. ``data`` must be contiguous.

    Any change of one 64-bit word changes it; words that swap within 4 KiB do not.
    """
    raw = data.detach().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()  # words must be aligned
    # int64 sums and products wrap around, which is arithmetic modulo 2^64. Odd factors have inverses there: they lose no bit.
    whole = raw.numel() - raw.numel() % BLOCK_BYTES
    words = raw[:whole].view(torch.int64).view(-1, _BLOCK_WORDS).sum(1)
    if whole < raw.numel():
        rest = raw.new_zeros(BLOCK_BYTES)
        rest[: raw.numel() - whole] = raw[whole:]
        words = torch.cat([words, rest.view(torch.int64)])
    weights = _weights(1 << words.numel().bit_length(), words.device)[: words.numel()]
    return (words * weights).sum() + torch.tensor(raw.numel()) * (_ODD - 2**64)


class TensorDigests:
    """Both ranks of a pair must add the same segments in the same order."""

    def __init__(self, names: Iterable[str]) -> None:
        self._index = {name: index for index, name in enumerate(dict.fromkeys(names))}
        self._added: list[tuple[int, Tensor]] = []

    def __len__(self) -> int:
        return len(self._index)

    def add(self, name: str, value: Tensor) -> None:
        self._added.append((self._index[name], value))

    def as_tensor(self) -> Tensor:
        """Returns int64 [tensors] on the CPU, in the order of first mention."""
        total = torch.zeros(len(self._index), dtype=torch.int64)
        if not self._added:
            return total
        index, values = zip(*self._added, strict=True)
        # Each segment has its odd number, so that two swapped segments change the sum.
        keys = torch.arange(3, 2 * len(values) + 2, 2)
        return total.index_add_(0, torch.tensor(index), torch.stack(values).cpu() * keys)

    def different(self, other: Tensor) -> dict[str, tuple[int, int]]:
        """Returns by name the other's digest and this one, unsigned."""
        pairs = (other.tolist(), self.as_tensor().tolist())
        values = {name: tuple(digests[index] % 2**64 for digests in pairs) for name, index in self._index.items()}
        return {name: (sent, arrived) for name, (sent, arrived) in values.items() if sent != arrived}


@lru_cache(maxsize=32)
def _weights(count: int, device: torch.device) -> Tensor:
    odd = torch.arange(1, 2 * count, 2, device=device)
    return odd * (_ODD - 2**64)
