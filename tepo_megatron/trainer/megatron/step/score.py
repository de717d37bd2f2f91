"""Computes log-probs and entropies of every token of a batch under the current weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.core.types import Batch, TokenScores
from tepo_megatron.errors import NotFiniteError
from tepo_megatron.trainer.megatron.platform.collectives import broadcast_json
from tepo_megatron.trainer.megatron.step.forward import Forward
from tepo_megatron.trainer.megatron.step.not_finite import NOT_FINITE
from tepo_megatron.trainer.megatron.step.token_values import on_every_rank


def score(forward: Forward, chunks: Sequence[torch.nn.Module], batch: Batch) -> TokenScores:
    """Scores the whole batch; detached, the same on every rank, 0 outside the loss mask. Every rank calls.

    They come out of the micro-batches that an update of the same batch is computed in. Raises NotFiniteError, on every rank,
    where a score is not finite.
    """
    return score_micro_batches(forward, chunks, batch, forward.micro_batches(batch))


def score_micro_batches(
    forward: Forward, chunks: Sequence[torch.nn.Module], batch: Batch, micro_batches: Sequence[Sequence[int]]
) -> TokenScores:
    """Scores as :func:`score` does, in the caller's micro-batches: those of this data-parallel rank, as sequence numbers.

    Over all data-parallel ranks each sequence is in one micro-batch, and every rank has as many.
    """

    def keep(scores: TokenScores, micro: Batch) -> tuple[Tensor, dict[str, Any]]:
        return scores.logprob.sum(), {"scores": torch.stack([scores.logprob, scores.entropy])}

    with torch.no_grad():
        kept = forward.run(chunks, batch, micro_batches, keep, train=False)
    failed = torch.zeros(forward.ranks.world, device=batch.tokens_T.device)
    reasons = [scores[NOT_FINITE] for scores in kept if NOT_FINITE in scores]
    failed[forward.ranks.rank] = len(reasons)
    dist.all_reduce(failed)
    if failed.any():
        first = int(failed.nonzero()[0])
        reason = broadcast_json(reasons[0] if reasons else None, source=first, device=failed.device)
        raise NotFiniteError(f"rank {first}: {reason}")
    places = [batch.token_index(sequences) for sequences in micro_batches]
    logprob_T, entropy_T = on_every_rank(forward, places, [micro["scores"] for micro in kept], (2, batch.num_tokens))
    return TokenScores(logprob=logprob_T, entropy=entropy_T)
