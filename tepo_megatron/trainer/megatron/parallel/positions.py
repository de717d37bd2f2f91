"""Positions of a context-parallel rank's tokens, and the rotary embedding by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


def rank_order(lengths: ArrayLike, cp: int) -> NDArray[np.int64]:
    """Returns [T]: rank 0's T/cp tokens first. Lengths are multiples of 2 · cp."""
    lengths_S = np.asarray(lengths)
    chunk_T = _positions(lengths_S) * (2 * cp) // np.repeat(lengths_S, lengths_S)
    return np.minimum(chunk_T, 2 * cp - 1 - chunk_T).argsort(kind="stable")


def local_positions(lengths: ArrayLike, cp: int, cp_rank: int) -> NDArray[np.int64]:
    """Returns [T/cp]: the position in its sequence of each of a rank's tokens."""
    position_T = _positions(np.asarray(lengths))
    return position_T if cp == 1 else position_T[rank_order(lengths, cp).reshape(cp, -1)[cp_rank]]


def _positions(lengths_S: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    return np.arange(lengths_S.sum()) - np.repeat(lengths_S.cumsum() - lengths_S, lengths_S)


def rotate_packed(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0) -> Tensor:
    """Turns the first ``freqs.size(-1)`` dimensions of t [t, heads, d]. On a CPU it replaces Transformer Engine's kernel:
    Megatron's own function cuts out every sequence in every layer.
    """
    angles = freqs[..., : freqs.size(-1) // 2].flatten(1)[:, None]  # its other half is the same
    positions_t = torch.from_numpy(local_positions(cu_seqlens.diff(), cp_size, cp_rank))
    turned: Tensor = _Rotation.apply(t, angles.cos().to(t.dtype)[positions_t], angles.sin().to(t.dtype)[positions_t])
    return turned


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(t, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, -sin), None, None


def _rotated(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.size(-1)
    first, second, rest = t.tensor_split([half, 2 * half], -1)
    result = torch.empty_like(t, memory_format=torch.contiguous_format)
    into = result.tensor_split([half, 2 * half], -1)
    torch.mul(first, cos, out=into[0]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=into[1]).addcmul_(first, sin)
    into[2].copy_(rest)
    return result
