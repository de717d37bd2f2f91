"""Which tokens could have been drawn in place of those that were: a sampler's mask, after top-k, top-p, min-p and bad words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

NO_TOKEN = -1
"""What :meth:`SamplingMask.padded` has where a token has fewer others."""


@dataclass(frozen=True, eq=False, init=False)
class SamplingMask:
    """For each of n tokens the others that could have been drawn, each once and not the drawn one; often there is none.

    ``counts`` int32 [n] says how many, ``ids`` int32 [Σ counts] which, token by token; both read-only. In the host's memory
    always. Two are equal if all their numbers are.
    """

    counts: NDArray[np.int32]
    ids: NDArray[np.int32]

    def __init__(self, counts: ArrayLike, ids: ArrayLike) -> None:
        """Raises ValueError where the two do not fit together."""
        found = [np.ascontiguousarray(each, np.int32) for each in (counts, ids)]
        if any(each.ndim != 1 for each in found) or (found[0] < 0).any() or found[0].sum(dtype=np.int64) != found[1].size:
            raise ValueError(
                f"a sampling mask of {found[0].sum(dtype=np.int64)} tokens beside those that were drawn names {found[1].size}"
            )
        for name, each in zip(("counts", "ids"), found, strict=True):
            each.flags.writeable = False
            object.__setattr__(self, name, each)

    @classmethod
    def empty(cls, n: int) -> SamplingMask:
        """That of ``n`` tokens that no sampler drew, or that were all that could be drawn."""
        return cls(np.zeros(n, np.int32), np.zeros(0, np.int32))

    @classmethod
    def joined(cls, parts: Iterable[SamplingMask]) -> SamplingMask:
        """One behind the other."""
        given = [cls.empty(0), *parts]
        return cls(np.concatenate([each.counts for each in given]), np.concatenate([each.ids for each in given]))

    def __len__(self) -> int:
        return self.counts.size

    def __getitem__(self, at: NDArray[np.int64]) -> SamplingMask:
        """Those of the tokens at these places, in their order."""
        counts = self.counts[at]
        ends = np.cumsum(counts, dtype=np.int64)
        starts = np.cumsum(self.counts, dtype=np.int64)[at] - counts
        return SamplingMask(
            counts, self.ids[np.arange(ends[-1] if ends.size else 0) + np.repeat(starts - (ends - counts), counts)]
        )

    def padded(self) -> NDArray[np.int32]:
        """As int32 [n, K], K the largest count, ``NO_TOKEN`` behind each token's."""
        most = int(self.counts.max(initial=0))
        found = np.full((len(self), most), NO_TOKEN, np.int32)
        found[np.arange(most) < self.counts[:, None]] = self.ids
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingMask):
            return NotImplemented
        return np.array_equal(self.counts, other.counts) and np.array_equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return hash((self.counts.tobytes(), self.ids.tobytes()))
