"""A sampler's mask: the tokens that could have been drawn instead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

NO_TOKEN = -1


@dataclass(frozen=True, eq=False, init=False)
class SamplingMask:
    """``counts`` int32 [n]: other tokens that could have been drawn, per drawn token; ``ids`` int32 [Σ counts]; read-only."""

    counts: NDArray[np.int32]
    ids: NDArray[np.int32]

    def __init__(self, counts: ArrayLike, ids: ArrayLike) -> None:
        """Raises ValueError unless ``ids`` has the length Σ counts."""
        counts, ids = np.ascontiguousarray(counts, np.int32), np.ascontiguousarray(ids, np.int32)
        total = counts.sum(dtype=np.int64)
        if counts.ndim != 1 or ids.ndim != 1 or (counts < 0).any() or total != ids.size:
            raise ValueError(f"a sampling mask of {total} tokens beside those that were drawn names {ids.size}")
        for name, values in (("counts", counts), ("ids", ids)):
            values.flags.writeable = False
            object.__setattr__(self, name, values)

    @classmethod
    def empty(cls, n: int) -> SamplingMask:
        return cls(np.zeros(n, np.int32), np.zeros(0, np.int32))

    @classmethod
    def joined(cls, parts: Iterable[SamplingMask]) -> SamplingMask:
        masks = [cls.empty(0), *parts]
        return cls(np.concatenate([mask.counts for mask in masks]), np.concatenate([mask.ids for mask in masks]))

    def __len__(self) -> int:
        return self.counts.size

    def __getitem__(self, indices: NDArray[np.int64]) -> SamplingMask:
        counts = self.counts[indices]
        ends = np.cumsum(counts, dtype=np.int64)
        starts = np.cumsum(self.counts, dtype=np.int64)[indices] - counts
        return SamplingMask(
            counts, self.ids[np.arange(ends[-1] if ends.size else 0) + np.repeat(starts - (ends - counts), counts)]
        )

    def padded(self) -> NDArray[np.int32]:
        """Returns int32 [n, largest count], padded with ``NO_TOKEN``."""
        width = int(self.counts.max(initial=0))
        padded = np.full((len(self), width), NO_TOKEN, np.int32)
        padded[np.arange(width) < self.counts[:, None]] = self.ids
        return padded

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingMask):
            return NotImplemented
        return np.array_equal(self.counts, other.counts) and np.array_equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return hash((self.counts.tobytes(), self.ids.tobytes()))
