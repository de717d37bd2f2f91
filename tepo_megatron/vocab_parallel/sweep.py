"""Sweeps over a shard of logits in row chunks that fit the cache, in plain torch.

Nothing of the logits' size is ever held in fp32: a chunk is upcast into a workspace, used, and overwritten by the next. exp is
taken as exp2, which is several times faster on CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tepo_megatron.vocab_parallel.combine import EMPTY_MAX

LOG2_E = math.log2(math.e)
_FAR_BELOW = -1e4
"""Stands for −inf in an exponent: 2 to it is 0, and 0 times it is 0, while 0 · −inf is NaN."""

_WORKSPACE_BYTES = {"cpu": 512 * 1024, "cuda": 128 * 1024 * 1024}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for bf16, fp16 and fp32; fp64 stays."""
    return torch.promote_types(dtype, torch.float32)


class Workspace:
    """Two buffers of one chunk each."""

    def __init__(self, like: Tensor, columns: int) -> None:
        dtype = compute_dtype(like.dtype)
        budget = _WORKSPACE_BYTES.get(like.device.type, _WORKSPACE_BYTES["cuda"])
        self.rows = max(1, budget // (2 * dtype.itemsize * max(columns, 1)))
        self._buffers = torch.empty(2, self.rows, columns, dtype=dtype, device=like.device)

    def pair(self, rows: int) -> tuple[Tensor, Tensor]:
        return self._buffers[0, :rows], self._buffers[1, :rows]


def chunks(rows_R: Tensor | None, tokens: int, size: int) -> Iterator[tuple[slice, slice | Tensor]]:
    """Cut the scored rows into chunks: where each lies among the R scored rows, and how to index it among the T tokens."""
    count = tokens if rows_R is None else rows_R.numel()
    place = None if rows_R is None else rows_R.cpu()
    for start in range(0, count, size):
        at = slice(start, min(start + size, count))
        if place is None:
            yield at, at
            continue
        first, last = int(place[at.start]), int(place[at.stop - 1])
        contiguous = last - first == at.stop - at.start - 1
        assert rows_R is not None
        yield at, slice(first, last + 1) if contiguous else rows_R[at]


def row_statistics(logits_cV: Tensor, temperature: float, buffers: tuple[Tensor, Tensor], out_c4: Tensor, *, clamp: bool) -> bool:
    """Maximum, Σ e^t and Σ e^t·t of a chunk of rows into ``out_c4[:, :3]``; returns whether −inf was met (``clamp`` from then on).

    ``logits_cV`` has only columns that are no padding, at least one. On CPU a −inf is noticed by the NaN that it leaves, which
    spares a pass; on an accelerator, where looking would wait for the device, the caller sets ``clamp``.
    """
    t_cV, e_cV = buffers
    max_c1 = logits_cV.amax(1, keepdim=True).to(t_cV.dtype).clamp(min=EMPTY_MAX)
    t_cV.copy_(logits_cV)
    _exponents(t_cV, max_c1, temperature, clamp)
    torch.exp2(t_cV, out=e_cV)
    out_c4[:, 0:1] = max_c1
    torch.sum(e_cV, 1, out=out_c4[:, 1])
    torch.mul(torch.linalg.vecdot(e_cV, t_cV), 1 / LOG2_E, out=out_c4[:, 2])
    if not clamp and bool(out_c4[:, 2].isnan().any()):
        row_statistics(logits_cV, temperature, buffers, out_c4, clamp=True)
        return True
    return clamp


def logit_gradient(
    logits_cV: Tensor,
    temperature: float,
    max_c: Tensor,
    log_sum_c: Tensor,
    entropy_c: Tensor,
    grad_logprob_c: Tensor | None,
    grad_entropy_c: Tensor | None,
    buffers: tuple[Tensor, Tensor],
    *,
    clamp: bool,
) -> Tensor:
    """The gradient of a chunk's logits, but for the label's own +grad_logprob; in one of the buffers.

    With p = e^t / S and log p = t − log S: −grad_logprob · p − grad_entropy · p (log p + H), over the temperature.
    """
    t_cV, e_cV = buffers
    t_cV.copy_(logits_cV)
    _exponents(t_cV, max_c.unsqueeze(1), temperature, clamp)
    torch.exp2(t_cV, out=e_cV)
    scale_c = (-log_sum_c).exp() / temperature
    constant_c = torch.zeros_like(scale_c) if grad_logprob_c is None else -grad_logprob_c * scale_c
    if grad_entropy_c is None:
        return e_cV.mul_(constant_c.unsqueeze(1))
    constant_c = constant_c - grad_entropy_c * scale_c * (entropy_c - log_sum_c)
    slope_c = -grad_entropy_c * scale_c / LOG2_E
    torch.addcmul(constant_c.unsqueeze(1), t_cV, slope_c.unsqueeze(1), out=t_cV)
    return e_cV.mul_(t_cV)


def _exponents(t_cV: Tensor, max_c1: Tensor, temperature: float, clamp: bool) -> None:
    """x to (x − max)/temperature in units of log 2, in place. Subtracting first keeps large offsets exact."""
    t_cV.sub_(max_c1).mul_(LOG2_E / temperature)
    if clamp:
        t_cV.clamp_(min=_FAR_BELOW)
