"""Sends batches to every rank, and divides micro-batches over context-parallel ranks.

A sequence has 2 · cp equal chunks; rank r computes chunks r and 2 cp − 1 − r, as Transformer Engine for ``thd``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from tepo_megatron.core.rollout import SamplingMask, not_recorded
from tepo_megatron.core.types import Batch, TokenScores
from tepo_megatron.trainer.megatron.parallel.collectives import broadcast_json
from tepo_megatron.trainer.megatron.parallel.platform import Ranks
from tepo_megatron.trainer.megatron.parallel.positions import rank_order

_PIECE_BYTES = 2**28  # limits GPU memory: a step's routes are gigabytes
_ON_HOST = ("routed_experts_T", "mask_counts", "mask_ids")


def broadcast(batch: Batch | None, device: torch.device) -> Batch:
    """Every rank calls; only rank 0's argument is read. Routes and sampling masks stay in host memory."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        assert batch is not None
        return batch.to(device)
    tensors: dict[str, Tensor] = {}
    if batch is not None:
        tensors = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
        if (mask := batch.sampling_mask_T) is not None:
            tensors |= {"mask_counts": torch.tensor(mask.counts), "mask_ids": torch.tensor(mask.ids)}
    described = [[name, str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in tensors.items()]
    for name, dtype, shape in broadcast_json(described, source=0, device=device):
        if batch is None:
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        tensors[name] = tensors[name].to("cpu" if name in _ON_HOST else device)
        # as bytes: NCCL knows no int16
        for piece in tensors[name].contiguous().view(-1).view(torch.uint8).split(_PIECE_BYTES):
            sent = piece.to(device)
            dist.broadcast(sent, src=0)
            if sent.data_ptr() != piece.data_ptr():
                piece.copy_(sent)
    counts, ids = tensors.pop("mask_counts", None), tensors.pop("mask_ids", None)
    mask = None if counts is None or ids is None else SamplingMask(counts.numpy(), ids.numpy())
    return Batch(**tensors, sampling_mask_T=mask)


def _pad(batch: Batch, num_tokens: int, cp: int) -> Batch:
    """Makes lengths multiples of 2 · cp, by beginnings of the longest sequence: padding must not set the
    maximum by which FP8 scales.
    """
    lengths_S, multiple = batch.lengths_S, 2 * cp if cp > 1 else 1
    padded_S = (lengths_S + multiple - 1) // multiple * multiple
    longest = int(padded_S.argmax())
    width = int(padded_S[longest])
    missing = num_tokens - int(padded_S.sum())
    if missing == 0 and torch.equal(padded_S, lengths_S):
        return batch
    parts = [*range(batch.num_sequences), *[longest] * -(-missing // width)]
    taken_S = torch.cat([padded_S, padded_S.new_tensor([min(width, missing - done) for done in range(0, missing, width)])])
    cu_seqlens = torch.cat([batch.cu_seqlens[:1], taken_S.cumsum(0).to(batch.cu_seqlens)])
    source_S = torch.tensor(parts, device=padded_S.device)
    index_T = torch.repeat_interleave(torch.arange(len(parts), device=padded_S.device), taken_S)
    position_T = torch.arange(num_tokens, device=padded_S.device) - cu_seqlens.long()[index_T]
    last_T = lengths_S[source_S][index_T] - 1
    added_T = (position_T > last_T) | (index_T >= batch.num_sequences)
    source_T = batch.cu_seqlens.long()[source_S][index_T] + position_T.minimum(last_T)
    changes: dict[str, Any] = {"tokens_T": batch.tokens_T[source_T]}
    for name, value in vars(batch).items():
        if isinstance(value, SamplingMask):
            with_none = SamplingMask.joined([value, SamplingMask.empty(1)])
            changes[name] = with_none[np.where(added_T.cpu().numpy(), len(value), source_T.cpu().numpy())]
        elif value is None or name in ("tokens_T", "cu_seqlens", "expert_load_LE"):
            continue
        elif name.endswith("_T"):
            added = added_T.to(value.device).view(-1, *[1] * (value.dim() - 1))
            nothing = not_recorded(value.itemsize) if name == "routed_experts_T" else 0
            changes[name] = value[source_T.to(value.device)].masked_fill(added, nothing)
        else:
            shape = (len(parts) - batch.num_sequences, *value.shape[1:])
            changes[name] = torch.cat([value, value.new_full(shape, -1 if name == "recorded_S" else 0)])
    return batch.with_(cu_seqlens=cu_seqlens, **changes)


@dataclass(frozen=True)
class Share:
    """The t = T/cp tokens of this rank."""

    micro: Batch

    tokens_t: Tensor
    positions_t: Tensor
    labels_t: Tensor
    mask_t: Tensor  # tokens with scores
    packed: PackedSeqParams

    source_T: Tensor  # positions of ``micro``'s tokens among those of the group's ranks
    cp_group: dist.ProcessGroup | None

    real_t: Tensor  # not padding
    chosen_tLk: Tensor | None = None
    kept_tK: Tensor | None = None  # int32: tokens that could have been drawn, −1 if fewer than K. None: all

    def gather(self, scores: TokenScores) -> TokenScores:
        """Every rank of the group calls. Backward does not communicate: ranks have the whole loss."""
        slope_T = None if scores.entropy_slope is None else self._gather(scores.entropy_slope).detach()
        return TokenScores(self._gather(scores.logprob), self._gather(scores.entropy), slope_T)

    def _gather(self, values_t: Tensor) -> Tensor:
        if self.cp_group is not None:
            # backward: all ranks compute the same output, so its gradient is split and not summed
            values_t = gather_from_sequence_parallel_region(values_t, tensor_parallel_output_grad=False, group=self.cp_group)
        return values_t[self.source_T]


def cut(micro: Batch, num_tokens: int, ranks: Ranks) -> Share:
    """``num_tokens``: at least ``padded_tokens``, and a multiple of 2 · cp if cp > 1."""
    padded = _pad(micro, num_tokens, ranks.cp)
    cu_seqlens, longest = padded.cu_seqlens, int(padded.lengths_S.max())
    # Padding is a part of its sequence: later tokens change nothing for a token. With the same tensor for both kinds of
    # offsets Transformer Engine sees without looking into it that there is nothing between sequences, which is faster.
    apart = (cu_seqlens, cu_seqlens) if ranks.cp > 1 else (None, None)
    packed = PackedSeqParams("thd", cu_seqlens, cu_seqlens, *apart, max_seqlen_q=longest, max_seqlen_kv=longest)
    real_T = cu_seqlens.long()[micro.sequence_index_T] + micro.positions_T
    order_T = rank_order(cu_seqlens, ranks.cp)
    local_t = order_T.view(ranks.cp, -1)[ranks.cp_rank]
    real = torch.zeros_like(padded.loss_mask_T).index_fill(0, real_T, True)
    chosen = padded.routed_experts_T
    kept_tK = None
    if padded.sampling_mask_T is not None:
        kept_tK = torch.from_numpy(padded.sampling_mask_T[local_t.cpu().numpy()].padded()).to(local_t.device)
    return Share(
        micro=micro,
        tokens_t=padded.tokens_T[local_t],
        positions_t=padded.positions_T[local_t],
        labels_t=padded.labels_T[local_t],
        mask_t=padded.loss_mask_T[local_t],
        packed=packed,
        source_T=order_T.argsort()[real_T],
        cp_group=ranks.cp_group,
        real_t=real[local_t],
        chosen_tLk=None if chosen is None else chosen[local_t.to(chosen.device)].to(local_t.device),
        kept_tK=kept_tK,
    )


def padded_tokens(lengths: Sequence[int], cp: int) -> int:
    multiple = 2 * cp if cp > 1 else 1
    return sum(-(-length // multiple) * multiple for length in lengths)
