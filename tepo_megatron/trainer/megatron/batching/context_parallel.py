"""Divides micro-batches over context-parallel ranks, and gathers their scores.

Each sequence is padded to 2 · cp equal chunks; rank r computes chunks r and 2 cp − 1 − r, as Transformer Engine does for
``thd``: equal work under causal attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from tepo_megatron.core.types import Batch, TokenScores
from tepo_megatron.trainer.megatron.batching.batch import pad_sequences, pad_to
from tepo_megatron.trainer.megatron.platform.parallel import Ranks


def _sequence_multiple(cp: int) -> int:
    return 2 * cp if cp > 1 else 1


def rank_order(cu_seqlens: Tensor, cp: int) -> Tensor:
    """Returns int64 [T]: rank 0's T/cp tokens first.

    ``cu_seqlens`` [S+1]: all lengths are multiples of 2 · cp.
    """
    offsets, lengths_S = cu_seqlens.long(), cu_seqlens.diff().long()
    index_T = torch.repeat_interleave(torch.arange(lengths_S.numel(), device=offsets.device), lengths_S)
    position_T = torch.arange(index_T.numel(), device=offsets.device) - offsets[index_T]
    chunk_T = position_T * (2 * cp) // lengths_S[index_T]
    return torch.minimum(chunk_T, 2 * cp - 1 - chunk_T).argsort(stable=True)


def packed_order(rank_order_T: Tensor) -> Tensor:
    """Inverts :func:`rank_order`."""
    return rank_order_T.argsort()


@dataclass(frozen=True)
class Share:
    """Holds the t = T/cp of a micro-batch's T padded tokens that this rank computes."""

    micro: Batch

    tokens_t: Tensor
    positions_t: Tensor
    labels_t: Tensor
    mask_t: Tensor
    """bool: tokens with scores."""

    packed: PackedSeqParams

    source_T: Tensor
    """Positions of ``micro``'s tokens among those of the group's ranks."""

    cp_group: dist.ProcessGroup | None

    real_t: Tensor
    """bool: not padding."""

    chosen_tLk: Tensor | None = None
    """See ``Batch.routed_experts_T``."""

    kept_tK: Tensor | None = None
    """int32: tokens that could have been drawn, −1 if fewer than K. None: all."""

    def gather(self, scores: TokenScores) -> TokenScores:
        """Every rank of the group calls. Backward does not communicate, because each rank has the whole micro-batch's loss."""
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
    """Takes this rank's share. ``num_tokens``: at least :func:`padded_tokens`, and a multiple of 2 · cp if cp > 1."""
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
