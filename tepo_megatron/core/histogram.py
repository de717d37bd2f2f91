"""Counts how far ratios moved in a step on a logarithmic grid, for the clip bound that leaves a share outside.

Integer counts add up equally over micro-batches and ranks: every rank derives one bound.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LEAST, _OCTAVES, _PER_OCTAVE = 2.0**-30, 40, 32
BINS = 1 + _OCTAVES * _PER_OCTAVE
"""The first counts moves that are 0, or away from the bound; a bin's edges have the ratio 2^(1/32) = 1.02."""


def count_moves(move_T: Tensor, where_T: Tensor) -> Tensor:
    """Returns int64 [BINS] on the host: tokens by their positive moves."""
    move_N = move_T[where_T].detach().double()
    bins_N = ((move_N.clamp(min=_LEAST) / _LEAST).log2() * _PER_OCTAVE).floor().long().clamp(max=BINS - 2) + 1
    return torch.bincount(torch.where(move_N > 0, bins_N, 0), minlength=BINS).cpu()


def bound_for_share(counts_B: Tensor, share: float) -> float | None:
    """Returns the bound, exact to 2 %, that leaves ``share`` of the counted tokens above it; None if fewer moved."""
    counts_B = counts_B.double()
    outside = share * float(counts_B.sum())
    above_B = counts_B.flip(0).cumsum(0).flip(0)  # in this bin and those above
    candidates = (above_B >= outside).nonzero()
    if not outside or not len(candidates):
        return None
    index = int(candidates[-1])
    if index == 0:
        return None
    within = (float(above_B[index]) - outside) / float(counts_B[index])
    return _LEAST * math.exp2((index - 1 + within) / _PER_OCTAVE)
