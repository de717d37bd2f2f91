"""A fingerprint of weights: 64 bits that do not depend on how the model is split over ranks, for ``WeightsVersion.digest``.

It does not protect against somebody who forges weights. For the check of what travels see ``bridge.transfer.verification``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tepo_megatron.weights.geometry import Shard

_CHUNK = 2**20
"""Number of elements that are widened to 64 bits at once."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64)


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
