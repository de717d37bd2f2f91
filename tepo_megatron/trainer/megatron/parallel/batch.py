"""Sends batches to every rank, and divides micro-batches over context-parallel ranks.

A sequence has 2 · cp equal chunks; rank r computes chunks r and 2 cp − 1 − r, as Transformer Engine for ``thd``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from numpy.typing import NDArray
from torch import Tensor

from tepo_megatron.core.rollout import SamplingMask, not_recorded
from tepo_megatron.core.types import ON_HOST, Batch, TokenScores
from tepo_megatron.trainer.megatron.parallel.collectives import broadcast_json
from tepo_megatron.trainer.megatron.parallel.platform import Ranks
from tepo_megatron.trainer.megatron.parallel.positions import local_positions, rank_order

_PIECE_BYTES = 2**28  # limits GPU memory: a step's routes are gigabytes


def broadcast(batch: Batch | None, device: torch.device) -> Batch:
    """Every rank calls; only rank 0's argument is read. `ON_HOST` stays in host memory."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        assert batch is not None
        return batch.to(device)
    tensors: dict[str, Any] = {}
    if batch is not None:
        tensors = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
        if (mask := batch.sampling_mask_T) is not None:
            tensors |= {"mask_counts": torch.tensor(mask.counts), "mask_ids": torch.tensor(mask.ids)}
    described = [[name, str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in tensors.items()]
    for name, dtype, shape in broadcast_json(described, source=0, device=device):
        if batch is None:
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        tensors[name] = tensors[name].to("cpu" if name in (*ON_HOST, "mask_counts", "mask_ids") else device)
        # as bytes: NCCL knows no int16
        for piece in tensors[name].contiguous().view(-1).view(torch.uint8).split(_PIECE_BYTES):
            sent = piece.to(device)
            dist.broadcast(sent, src=0)
            if sent.data_ptr() != piece.data_ptr():
                piece.copy_(sent)
    counts, ids = tensors.pop("mask_counts", None), tensors.pop("mask_ids", None)
    mask = None if counts is None or ids is None else SamplingMask(counts.numpy(), ids.numpy())
    return Batch(**tensors, sampling_mask_T=mask)


class _Padded(NamedTuple):
    lengths_S: NDArray[np.int64]
    source_T: NDArray[np.int64]  # token of the micro-batch
    added_T: NDArray[np.bool_]
    position_T: NDArray[np.int64]


def _pad(lengths: Sequence[int], num_tokens: int, cp: int) -> _Padded:
    """Makes lengths multiples of 2 · cp, by beginnings of the longest sequence: padding must not set the
    maximum by which FP8 scales.
    """
    lengths_S, multiple = np.array(lengths), 2 * cp if cp > 1 else 1
    padded_S = -(-lengths_S // multiple) * multiple
    longest = int(padded_S.argmax())
    width, missing = int(padded_S[longest]), num_tokens - int(padded_S.sum())
    widths = [min(width, missing - done) for done in range(0, missing, width)]
    part_S = np.array([*range(len(lengths)), *[longest] * len(widths)])
    taken_S = np.array([*padded_S, *widths])
    index_T, position_T = np.repeat(np.arange(len(taken_S)), taken_S), local_positions(taken_S, 1, 0)
    last_T = lengths_S[part_S][index_T] - 1
    added_T = (position_T > last_T) | (index_T >= len(lengths))
    starts_S = lengths_S.cumsum() - lengths_S
    return _Padded(taken_S, starts_S[part_S][index_T] + np.minimum(position_T, last_T), added_T, position_T)


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
    teacher_t: Tensor | None = None
    top_ids_tK: Tensor | None = None
    top_logprobs_tK: Tensor | None = None
    kept_tK: Tensor | None = None  # int32, on the host: tokens that could have been drawn, −1 if fewer than K. None: all

    @classmethod
    def cut(cls, micro: Batch, lengths: Sequence[int], num_tokens: int, ranks: Ranks) -> Share:
        """``lengths``: of the sequences. ``num_tokens``: at least ``padded_tokens``, and a multiple of 2 · cp if cp > 1."""
        padded, device = _pad(lengths, num_tokens, ranks.cp), micro.tokens_T.device
        if micro.top_ids_TK is not None and micro.top_logprobs_TK is not None:
            ids_TK, logprobs_TK = (top.to(device, non_blocking=True) for top in (micro.top_ids_TK, micro.top_logprobs_TK))
            micro = micro.with_(top_ids_TK=ids_TK, top_logprobs_TK=logprobs_TK)

        def there(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(values).to(device, non_blocking=True)

        cu_seqlens, longest = there(np.append(0, padded.lengths_S.cumsum()).astype(np.int32)), int(padded.lengths_S.max())
        # Padding is a part of its sequence: later tokens change nothing for a token. With the same tensor for both kinds of
        # offsets Transformer Engine sees without looking into it that there is nothing between sequences, which is faster.
        apart = (cu_seqlens, cu_seqlens) if ranks.cp > 1 else (None, None)
        packed = PackedSeqParams("thd", cu_seqlens, cu_seqlens, *apart, max_seqlen_q=longest, max_seqlen_kv=longest)
        order_T = rank_order(padded.lengths_S, ranks.cp)
        local_t = order_T.reshape(ranks.cp, -1)[ranks.cp_rank]
        host_t, added_t = padded.source_T[local_t], padded.added_T[local_t]
        source_t, real_t = there(host_t), there(~added_t)
        chosen_tLk, routes_T, mask = None, micro.routed_experts_T, micro.sampling_mask_T
        if routes_T is not None:
            routes_T = routes_T[torch.from_numpy(host_t)]
            routes_T[torch.from_numpy(added_t)] = not_recorded(routes_T.itemsize)
            chosen_tLk = routes_T.to(device, non_blocking=True)
        if mask is not None:
            mask = SamplingMask.joined([mask, SamplingMask.empty(1)])[np.where(added_t, len(mask), host_t)]
        return cls(
            micro=micro,
            tokens_t=micro.tokens_T[source_t],
            positions_t=there(padded.position_T[local_t]),
            labels_t=micro.labels_T[source_t] * real_t,
            mask_t=micro.loss_mask_T[source_t] & real_t,
            packed=packed,
            source_T=there(order_T.argsort()[~padded.added_T]),
            cp_group=ranks.cp_group,
            real_t=real_t,
            teacher_t=None if micro.teachers_S is None else micro.teachers_S[micro.sequence_index_T][source_t],
            top_ids_tK=None if micro.top_ids_TK is None else micro.top_ids_TK[source_t],
            top_logprobs_tK=None if micro.top_logprobs_TK is None else micro.top_logprobs_TK[source_t],
            chosen_tLk=chosen_tLk,
            kept_tK=None if mask is None else torch.from_numpy(mask.padded()),
        )

    @staticmethod
    def padded_tokens(lengths: Sequence[int], cp: int) -> int:
        multiple = 2 * cp if cp > 1 else 1
        return sum(-(-length // multiple) * multiple for length in lengths)

    def gather(self, scores: TokenScores) -> TokenScores:
        """Every rank of the group calls. Backward does not communicate: ranks have the whole loss."""
        gathered: dict[str, Any] = {
            name: self._gather(value) for name, value in vars(scores).items() if isinstance(value, Tensor)
        }
        detached = {
            name: gathered[name].detach() for name in ("entropy_slope", "teacher_logprob", "agreement") if name in gathered
        }
        return replace(scores, **(gathered | detached))

    def masks(self, teachers: int) -> list[Tensor]:
        """Returns the scored tokens of each."""
        if self.teacher_t is None or teachers == 1:
            return [self.mask_t]
        return [self.mask_t & (self.teacher_t == number) for number in range(teachers)]

    def _gather(self, values_t: Tensor) -> Tensor:
        if self.cp_group is not None and not values_t.is_floating_point():
            return self._gather(values_t.float()).detach().to(values_t.dtype)
        if self.cp_group is not None:
            # backward: all ranks compute the same output, so its gradient is split and not summed
            values_t = gather_from_sequence_parallel_region(values_t, tensor_parallel_output_grad=False, group=self.cp_group)
        return values_t[self.source_T]
