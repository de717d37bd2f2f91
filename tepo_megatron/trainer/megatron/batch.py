"""Sends batches to every rank, and divides padded micro-batches over context-parallel ranks.

Each sequence has 2 · cp equal chunks; rank r computes chunks r and 2 cp − 1 − r, as Transformer Engine does for ``thd``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from numpy.typing import NDArray
from torch import Tensor

from tepo_megatron.core.rollout import SamplingMask, not_recorded
from tepo_megatron.core.types import Batch, TokenScores
from tepo_megatron.trainer.megatron.platform import Ranks

_NO_MASK = -1

_PIECE_BYTES = 2**28  # limits GPU memory: a step's routes are gigabytes


def broadcast(batch: Batch | None, device: torch.device) -> Batch:
    """Every rank calls; only rank 0's argument is read. Routes and sampling masks stay in host memory."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        assert batch is not None
        return batch.to(device)
    sizes = torch.zeros(7, dtype=torch.int64)
    if batch is not None:
        components = 0 if batch.reward_parts_SK is None else batch.reward_parts_SK.shape[1]
        mask, routes_T = batch.sampling_mask_T, batch.routed_experts_T
        recorded = [_NO_MASK if mask is None else mask.ids.size]
        recorded += [0, 0, 0] if routes_T is None else [routes_T.itemsize, *routes_T.shape[1:]]
        sizes = torch.tensor([batch.num_sequences, batch.num_tokens, components, *recorded])
    sizes = sizes.to(device)
    dist.broadcast(sizes, src=0)
    sequences, tokens, components, mask_size, *routes = sizes.tolist()
    if batch is not None:
        tokens_T, mask_T = batch.tokens_T.int().to(device), batch.loss_mask_T.to(torch.uint8).to(device)
        sampler_logprobs_T = batch.sampler_logprobs_T.to(device)
        values = [batch.cu_seqlens, batch.groups_S, batch.rewards_S]
        values += [] if batch.reward_parts_SK is None else [batch.reward_parts_SK.flatten()]
        of_sequences = torch.cat([value.double() for value in values]).to(device)
    else:
        tokens_T, mask_T = (torch.empty(tokens, dtype=dtype, device=device) for dtype in (torch.int32, torch.uint8))
        sampler_logprobs_T = torch.empty(tokens, dtype=torch.float32, device=device)
        of_sequences = torch.empty((3 + components) * sequences + 1, dtype=torch.float64, device=device)
    for tensor in (of_sequences, tokens_T, mask_T, sampler_logprobs_T):
        dist.broadcast(tensor, src=0)
    lengths = [sequences + 1, sequences, sequences, components * sequences]
    cu_seqlens, groups_S, rewards_S, parts = of_sequences.split(lengths)
    cu_seqlens = cu_seqlens.int()
    labels_T = torch.cat([tokens_T[1:], tokens_T.new_zeros(1)]).long()
    labels_T[cu_seqlens[1:].long() - 1] = 0
    return Batch(
        tokens_T.long(),
        labels_T,
        mask_T.bool(),
        cu_seqlens,
        sampler_logprobs_T,
        rewards_S.float(),
        groups_S.long(),
        routed_experts_T=_broadcast_routes(batch.routed_experts_T if batch else None, tokens, routes, device),
        reward_parts_SK=parts.float().view(sequences, components) if components else None,
        sampling_mask_T=_broadcast_mask(batch.sampling_mask_T if batch else None, tokens, mask_size, device),
    )


def _broadcast_routes(routes_T: Tensor | None, tokens: int, sizes: list[int], device: torch.device) -> Tensor | None:
    """``sizes``: bytes of a number (0: no record), layers, experts per token."""
    itemsize, *shape = sizes
    if not itemsize:
        return None
    if routes_T is None:
        routes_T = torch.empty(tokens, *shape, dtype=torch.uint8 if itemsize == 1 else torch.int16)
    _broadcast_in_pieces(routes_T.contiguous().view(-1).view(torch.uint8), device)  # NCCL knows no int16
    return routes_T


def _broadcast_mask(mask: SamplingMask | None, tokens: int, size: int, device: torch.device) -> SamplingMask | None:
    if size == _NO_MASK:
        return None
    flat = torch.empty(tokens + size, dtype=torch.int32)
    if mask is not None:
        flat = torch.cat([torch.tensor(mask.counts), torch.tensor(mask.ids)])
    _broadcast_in_pieces(flat, device)
    numbers = flat.numpy()
    return SamplingMask(numbers[:tokens], numbers[tokens:])


def _broadcast_in_pieces(flat: Tensor, device: torch.device) -> None:
    for piece in flat.split(_PIECE_BYTES // flat.itemsize):
        sent = piece.to(device)
        dist.broadcast(sent, src=0)
        if sent.data_ptr() != piece.data_ptr():
            piece.copy_(sent)


def pad_to(batch: Batch, num_tokens: int) -> Batch:
    """Repeats the longest sequence's start: padding must not set a tensor's largest value, by which FP8 may scale."""
    missing = num_tokens - batch.num_tokens
    if missing == 0:
        return batch
    longest_T = batch.tokens_T[batch.token_index([int(batch.lengths_S.argmax())])]
    lengths = [min(longest_T.numel(), missing - start) for start in range(0, missing, longest_T.numel())]
    changes: dict[str, Any] = {"tokens_T": torch.cat([batch.tokens_T, *(longest_T[:length] for length in lengths)])}
    for f in fields(batch):
        value = getattr(batch, f.name)
        if isinstance(value, SamplingMask):
            changes[f.name] = SamplingMask.joined([value, SamplingMask.empty(missing)])
        elif value is not None and f.name not in ("tokens_T", "cu_seqlens", "expert_load_LE"):
            extra = missing if f.name.endswith("_T") else len(lengths)
            changes[f.name] = torch.cat([value, value.new_full((extra, *value.shape[1:]), _filler(f.name, value))])
    ends = batch.num_tokens + torch.tensor(lengths).cumsum(0).to(batch.cu_seqlens)
    return batch.with_(cu_seqlens=torch.cat([batch.cu_seqlens, ends]), **changes)


def pad_sequences(batch: Batch, multiple: int) -> Batch:
    lengths_S = batch.lengths_S
    padded_S = (lengths_S + multiple - 1) // multiple * multiple
    if torch.equal(padded_S, lengths_S):
        return batch
    cu_seqlens = torch.cat([batch.cu_seqlens[:1], padded_S.cumsum(0).to(batch.cu_seqlens)])
    index_T = torch.repeat_interleave(torch.arange(batch.num_sequences, device=padded_S.device), padded_S)
    position_T = torch.arange(index_T.numel(), device=padded_S.device) - cu_seqlens.long()[index_T]
    added_T = position_T >= lengths_S[index_T]
    source_T = batch.cu_seqlens.long()[index_T] + position_T.minimum(lengths_S[index_T] - 1)
    changes: dict[str, Any] = {"tokens_T": batch.tokens_T[source_T]}
    for f in fields(batch):
        value = getattr(batch, f.name)
        if isinstance(value, SamplingMask):
            changes[f.name] = _with_none(value, source_T.cpu().numpy(), added_T.cpu().numpy())
        elif value is not None and f.name.endswith("_T") and f.name != "tokens_T":
            source, added = source_T.to(value.device), added_T.to(value.device)
            added = added.view(-1, *[1] * (value.dim() - 1))
            changes[f.name] = value[source].masked_fill(added, _filler(f.name, value))
    return batch.with_(cu_seqlens=cu_seqlens, **changes)


def _with_none(mask: SamplingMask, source: NDArray[np.int64], added: NDArray[np.bool_]) -> SamplingMask:
    end = SamplingMask.joined([mask, SamplingMask.empty(1)])
    return end[np.where(added, len(mask), source)]


def _filler(name: str, value: Tensor) -> int:
    if name == "recorded_S":
        return -1
    return not_recorded(value.itemsize) if name == "routed_experts_T" else 0


def _sequence_multiple(cp: int) -> int:
    return 2 * cp if cp > 1 else 1


def rank_order(cu_seqlens: Tensor, cp: int) -> Tensor:
    """Returns int64 [T]: rank 0's T/cp tokens first. Lengths are multiples of 2 · cp."""
    offsets, lengths_S = cu_seqlens.long(), cu_seqlens.diff().long()
    index_T = torch.repeat_interleave(torch.arange(lengths_S.numel(), device=offsets.device), lengths_S)
    position_T = torch.arange(index_T.numel(), device=offsets.device) - offsets[index_T]
    chunk_T = position_T * (2 * cp) // lengths_S[index_T]
    return torch.minimum(chunk_T, 2 * cp - 1 - chunk_T).argsort(stable=True)


def packed_order(rank_order_T: Tensor) -> Tensor:
    return rank_order_T.argsort()


@dataclass(frozen=True)
class Share:
    """The t = T/cp tokens that this rank computes."""

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
        """Every rank of the group calls. Backward does not communicate: each rank has the whole loss."""
        slope = scores.entropy_slope
        return TokenScores(
            self._gather(scores.logprob),
            self._gather(scores.entropy),
            None if slope is None else self._gather(slope).detach(),
        )

    def _gather(self, values_t: Tensor) -> Tensor:
        if self.cp_group is not None:
            # backward: all ranks compute the same output, so its gradient is split and not summed
            values_t = gather_from_sequence_parallel_region(values_t, tensor_parallel_output_grad=False, group=self.cp_group)
        return values_t[self.source_T]


def cut(micro: Batch, num_tokens: int, ranks: Ranks) -> Share:
    """``num_tokens``: at least :func:`padded_tokens`, and a multiple of 2 · cp if cp > 1."""
    padded = pad_to(pad_sequences(micro, _sequence_multiple(ranks.cp)), num_tokens)
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
        source_T=packed_order(order_T)[real_T],
        cp_group=ranks.cp_group,
        real_t=real[local_t],
        chosen_tLk=None if chosen is None else chosen[local_t.to(chosen.device)].to(local_t.device),
        kept_tK=kept_tK,
    )


def padded_tokens(lengths: Sequence[int], cp: int) -> int:
    multiple = _sequence_multiple(cp)
    return sum(-(-length // multiple) * multiple for length in lengths)
