"""How far two scores of the same tokens by the same weights differ: the rounding that depends on a token's place.

A GPU's kernels round by place, so that a log-prob or an entropy has a floor of noise below which a difference means nothing.
It is measured: a few sequences are scored alone, and once more behind another sequence, so that every token stands elsewhere,
among another number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tepo_megatron.core.objective.ratio import sequence_sum
from tepo_megatron.core.types import Batch
from tepo_megatron.trainer.megatron.step.forward import Forward
from tepo_megatron.trainer.megatron.step.score import score_micro_batches

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def measure_noise(forward: Forward, chunks: Sequence[torch.nn.Module], batch: Batch, sequences: int) -> dict[str, float]:
    """Quantiles of the noise of entropies (nats), token ratios and sequence ratios, over the response tokens (or sequences) of
    about ``sequences`` sequences of the batch, of all lengths. 0 where rounding does not depend on the place.

    Names are ``entropy/noise/p99`` and so on. Every rank calls; all get the same.
    """
    alone = batch.select(_spread(batch, forward, sequences))
    count, ranks = alone.num_sequences, forward.ranks
    shortest = int(alone.lengths_S.argmin())
    behind = alone.select([at for pair in ((shortest, own) for own in range(count)) for at in pair])
    mine = range(count)[ranks.dp_rank :: ranks.dp]
    first = score_micro_batches(forward, chunks, alone, [[at] for at in mine])
    second = score_micro_batches(forward, chunks, behind, [[2 * at, 2 * at + 1] for at in mine])
    at_T = behind.token_index([2 * at + 1 for at in range(count)])
    mask_T, index_T = alone.loss_mask_T, alone.sequence_index_T
    delta_T = torch.where(mask_T, second.logprob[at_T] - first.logprob, 0.0)
    lengths_S = sequence_sum(mask_T.to(delta_T.dtype), index_T, count)
    mean_S = sequence_sum(delta_T, index_T, count) / lengths_S.clamp(min=1)
    found = {
        "entropy/noise": (second.entropy[at_T] - first.entropy)[mask_T].abs(),
        "ratio/noise": delta_T[mask_T].expm1().abs(),
        "sequence_ratio/noise": mean_S.expm1().abs(),
    }
    return {f"{name}/{label}": value for name, values in found.items() for label, value in _quantiles(values).items()}


def _spread(batch: Batch, forward: Forward, sequences: int) -> list[int]:
    """Sequences evenly spread over the sorted lengths, as many for each data-parallel rank, whole groups of micro-batches."""
    group = forward.ranks.dp * forward.ranks.micro_batch_group
    count = max(min(sequences, batch.num_sequences) // group, 1) * group
    order = batch.lengths_S.argsort(stable=True).tolist()
    return [order[at * (len(order) - 1) // max(count - 1, 1)] for at in range(count)]


def _quantiles(values: Tensor) -> dict[str, float]:
    """Quantiles of fp32 values [N], N > 0."""
    levels = torch.tensor(list(QUANTILES.values()), dtype=values.dtype, device=values.device)
    return dict(zip(QUANTILES, values.quantile(levels).tolist(), strict=True))
