"""Context parallelism: which tokens of a micro-batch a rank computes, and how its scores come back among all others.

Each sequence is padded to a multiple of 2 · cp tokens and cut into as many chunks; rank r computes chunks r and 2 cp − 1 − r of
every sequence. Under causal attention a later chunk costs more, and so all ranks have the same work: the zig-zag order of
Transformer Engine and Megatron-Core for packed sequences (``thd``).

Only the model knows of it. Its scores, a few floats a token, are gathered and put into the order of the micro-batch; every
rank of the group then computes the same loss of the whole micro-batch, and differentiates it by its own tokens' scores.
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


def sequence_multiple(cp: int) -> int:
    """Returns the number whose multiples the sequences of a micro-batch are padded to."""
    return 2 * cp if cp > 1 else 1


def rank_order(cu_seqlens: Tensor, cp: int) -> Tensor:
    """Returns where the tokens of the ranks stand in the padded micro-batch: int64 [T], rank 0's first, T/cp of each rank.

    ``cu_seqlens`` [S+1] are the offsets of sequences whose lengths are multiples of 2 · cp (any, if cp is 1).
    """
    offsets, lengths_S = cu_seqlens.long(), cu_seqlens.diff().long()
    index_T = torch.repeat_interleave(torch.arange(lengths_S.numel(), device=offsets.device), lengths_S)
    position_T = torch.arange(index_T.numel(), device=offsets.device) - offsets[index_T]
    chunk_T = position_T * (2 * cp) // lengths_S[index_T]
    return torch.minimum(chunk_T, 2 * cp - 1 - chunk_T).argsort(stable=True)


def packed_order(rank_order_T: Tensor) -> Tensor:
    """Returns the inverse of :func:`rank_order`: where each token of the padded micro-batch stands among the ranks'."""
    return rank_order_T.argsort()


@dataclass(frozen=True)
class Share:
    """A micro-batch, and the t = T/cp of its T padded tokens that this rank computes. Without context parallelism it is all."""

    micro: Batch
    """The micro-batch as it is, without padding: what the loss sees."""

    tokens_t: Tensor
    positions_t: Tensor
    labels_t: Tensor
    mask_t: Tensor
    """bool: which of the tokens have scores; padding has none."""

    packed: PackedSeqParams
    """The padded sequences, as attention and RoPE take them."""

    source_T: Tensor
    """Where the tokens of ``micro`` stand among those of all ranks of the group."""

    cp_group: dist.ProcessGroup | None

    real_t: Tensor
    """bool: which of the tokens are those of ``micro``, and not padding."""

    chosen_tLk: Tensor | None = None
    """The experts that the sampler recorded for the tokens, in all layers L of the model (``Batch.routed_experts_T``)."""

    kept_tK: Tensor | None = None
    """The tokens that could have been drawn in place of the labels, int32, −1 where there are fewer than K; None: all."""

    def gather(self, scores: TokenScores) -> TokenScores:
        """Returns the scores of every token of ``micro``, on all ranks of the group, from each rank's t.

        Every rank of the group calls. Differentiable in the rank's own scores and without communication backward: the gradient
        is this rank's part of that of its own loss, which is the whole micro-batch's on every rank.
        """
        slope = scores.entropy_slope
        return TokenScores(
            self._gather(scores.logprob),
            self._gather(scores.entropy),
            None if slope is None else self._gather(slope).detach(),
        )

    def _gather(self, values_t: Tensor) -> Tensor:
        if self.cp_group is not None:
            # backward: the output is computed alike on all ranks, so that its gradient is split and not summed
            values_t = gather_from_sequence_parallel_region(values_t, tensor_parallel_output_grad=False, group=self.cp_group)
        return values_t[self.source_T]


def cut(micro: Batch, num_tokens: int, ranks: Ranks) -> Share:
    """Pads a micro-batch to ``num_tokens``, and cuts out what this rank computes.

    ``num_tokens``: a multiple of what :func:`sequence_multiple` says, and no less than :func:`padded_tokens`.
    """
    padded = pad_to(pad_sequences(micro, sequence_multiple(ranks.cp)), num_tokens)
    cu_seqlens, longest = padded.cu_seqlens, int(padded.lengths_S.max())
    # Padding is a part of its sequence: what follows a token changes nothing for it. With the same tensor for both kinds of
    # offsets Transformer Engine sees without looking into it that there is nothing between sequences, which is faster.
    apart = (cu_seqlens, cu_seqlens) if ranks.cp > 1 else (None, None)
    packed = PackedSeqParams("thd", cu_seqlens, cu_seqlens, *apart, max_seqlen_q=longest, max_seqlen_kv=longest)
    real_T = cu_seqlens.long()[micro.sequence_index_T] + micro.positions_T
    order_T = rank_order(cu_seqlens, ranks.cp)
    own_t = order_T.view(ranks.cp, -1)[ranks.cp_rank]
    real = torch.zeros_like(padded.loss_mask_T).index_fill(0, real_T, True)
    chosen = padded.routed_experts_T
    kept = None
    if padded.sampling_mask_T is not None:
        kept = torch.from_numpy(padded.sampling_mask_T[own_t.cpu().numpy()].padded()).to(own_t.device)
    return Share(
        micro=micro,
        tokens_t=padded.tokens_T[own_t],
        positions_t=padded.positions_T[own_t],
        labels_t=padded.labels_T[own_t],
        mask_t=padded.loss_mask_T[own_t],
        packed=packed,
        source_T=packed_order(order_T)[real_T],
        cp_group=ranks.cp_group,
        real_t=real[own_t],
        chosen_tLk=None if chosen is None else chosen[own_t.to(chosen.device)].to(own_t.device),
        kept_tK=kept,
    )


def padded_tokens(lengths: Sequence[int], cp: int) -> int:
    """Returns the tokens of sequences of these lengths, each padded as context parallelism needs it."""
    multiple = sequence_multiple(cp)
    return sum(-(-length // multiple) * multiple for length in lengths)
