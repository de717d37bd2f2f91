"""Scores every token, and measures the scores' rounding noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.core.objective.ratio import sequence_sum
from tepo_megatron.core.types import Batch, TokenScores
from tepo_megatron.errors import NotFiniteError
from tepo_megatron.trainer.megatron.platform.collectives import broadcast_json
from tepo_megatron.trainer.megatron.step.forward import NOT_FINITE, Forward


def score(forward: Forward, chunks: Sequence[torch.nn.Module], batch: Batch) -> TokenScores:
    """Returns float32, detached, 0 outside the loss mask, the same on every rank. Every rank calls.

    Uses an update's micro-batches. Raises NotFiniteError on every rank.
    """
    return _score_micro_batches(forward, chunks, batch, forward.micro_batches(batch))


def _score_micro_batches(
    forward: Forward, chunks: Sequence[torch.nn.Module], batch: Batch, micro_batches: Sequence[Sequence[int]]
) -> TokenScores:
    """Every rank needs equally many micro-batches."""

    def keep(scores: TokenScores, micro: Batch) -> tuple[Tensor, dict[str, Any]]:
        return scores.logprob.sum(), {"scores": torch.stack([scores.logprob, scores.entropy])}

    with torch.no_grad():
        results = forward.run(chunks, batch, micro_batches, keep, train=False)
    failed = torch.zeros(forward.ranks.world, device=batch.tokens_T.device)
    reasons = [scores[NOT_FINITE] for scores in results if NOT_FINITE in scores]
    failed[forward.ranks.rank] = len(reasons)
    dist.all_reduce(failed)
    if failed.any():
        first = int(failed.nonzero()[0])
        reason = broadcast_json(reasons[0] if reasons else None, source=first, device=failed.device)
        raise NotFiniteError(f"rank {first}: {reason}")
    places = [batch.token_index(sequences) for sequences in micro_batches]
    logprob_T, entropy_T = on_every_rank(forward, places, [micro["scores"] for micro in results], (2, batch.num_tokens))
    return TokenScores(logprob=logprob_T, entropy=entropy_T)


_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def measure_noise(forward: Forward, chunks: Sequence[torch.nn.Module], batch: Batch, sequences: int) -> dict[str, float]:
    """Returns quantiles for entropies (nats), token ratios and sequence ratios, as ``entropy/noise/p99`` etc.

    A GPU's kernels round by a token's place, so about ``sequences`` sequences are scored alone, and again after another
    sequence. Every rank calls; all get the same.
    """
    alone = batch.select(_spread(batch, forward, sequences))
    count, ranks = alone.num_sequences, forward.ranks
    shortest = int(alone.lengths_S.argmin())
    behind = alone.select([index for pair in ((shortest, other) for other in range(count)) for index in pair])
    mine = range(count)[ranks.dp_rank :: ranks.dp]
    first = _score_micro_batches(forward, chunks, alone, [[index] for index in mine])
    second = _score_micro_batches(forward, chunks, behind, [[2 * index, 2 * index + 1] for index in mine])
    at_T = behind.token_index([2 * index + 1 for index in range(count)])
    mask_T, index_T = alone.loss_mask_T, alone.sequence_index_T
    delta_T = torch.where(mask_T, second.logprob[at_T] - first.logprob, 0.0)
    lengths_S = sequence_sum(mask_T.to(delta_T.dtype), index_T, count)
    mean_S = sequence_sum(delta_T, index_T, count) / lengths_S.clamp(min=1)
    noise = {
        "entropy/noise": (second.entropy[at_T] - first.entropy)[mask_T].abs(),
        "ratio/noise": delta_T[mask_T].expm1().abs(),
        "sequence_ratio/noise": mean_S.expm1().abs(),
    }
    return {f"{name}/{label}": value for name, values in noise.items() for label, value in _quantiles(values).items()}


def _spread(batch: Batch, forward: Forward, sequences: int) -> list[int]:
    group = forward.ranks.dp * forward.ranks.micro_batch_group
    count = max(min(sequences, batch.num_sequences) // group, 1) * group
    order = batch.lengths_S.argsort(stable=True).tolist()
    return [order[index * (len(order) - 1) // max(count - 1, 1)] for index in range(count)]


def _quantiles(values: Tensor) -> dict[str, float]:
    levels = torch.tensor(list(_QUANTILES.values()), dtype=values.dtype, device=values.device)
    return dict(zip(_QUANTILES, values.quantile(levels).tolist(), strict=True))


def on_every_rank(forward: Forward, places: Sequence[Tensor], values_of: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
    """Returns float32 [n, tokens] on every rank, 0 where missing. Every rank calls.

    ``places``: positions of this rank's tokens; ``values_of``: [n, t] each, empty except on the last pipeline stage.
    """
    result = torch.zeros(shape, device=forward.platform.device)
    # Tensor- and context-parallel ranks have the same values; of the pipeline only the last stage has some.
    if forward.ranks.tp_rank == 0 and forward.ranks.cp_rank == 0:
        for place, values in zip(places, values_of, strict=False):
            result[:, place] = values
    # Each token was computed by one data-parallel rank; adding zeros brings it to all, unchanged.
    dist.all_reduce(result)
    return result
