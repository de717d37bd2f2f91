"""Positions of a context-parallel rank's tokens, and the rotary embedding by them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rank_order(cu_seqlens: Tensor, cp: int) -> Tensor:
    """Returns int64 [T]: rank 0's T/cp tokens first. Lengths are multiples of 2 · cp."""
    index_T, position_T = _places(cu_seqlens)
    chunk_T = position_T * (2 * cp) // cu_seqlens.diff().long()[index_T]
    return torch.minimum(chunk_T, 2 * cp - 1 - chunk_T).argsort(stable=True)


def local_positions(cu_seqlens: Tensor, cp: int, cp_rank: int) -> Tensor:
    """Returns int64 [T/cp]: the position in its sequence of each of a rank's tokens."""
    position_T = _places(cu_seqlens)[1]
    return position_T if cp == 1 else position_T[rank_order(cu_seqlens, cp).view(cp, -1)[cp_rank]]


def _places(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    index_T = torch.repeat_interleave(cu_seqlens.diff().long())
    return index_T, torch.arange(index_T.numel(), device=index_T.device) - cu_seqlens.long()[index_T]


def rotate_packed(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0) -> Tensor:
    """Turns the first ``freqs.size(-1)`` dimensions of t [t, heads, d]. On a CPU it replaces Transformer Engine's kernel:
    Megatron's own function cuts out every sequence in every layer.
    """
    angles = freqs[..., : freqs.size(-1) // 2].flatten(1)[:, None]  # its other half is the same
    positions_t = local_positions(cu_seqlens, cp_size, cp_rank)
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
