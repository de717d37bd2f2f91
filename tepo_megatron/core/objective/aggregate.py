"""From token values to one number: a weight per token, and one denominator for the whole optimizer step.

Every term of the objective (surrogate, KL, entropy bonus) is summed with the same weights and divided by the same denominator,
so a coefficient means the same beside every aggregation (docs/reference/tepo.md, "Surrogate and aggregation").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tepo_megatron.config.objective.custom import OwnAggregation
from tepo_megatron.core.objective.own import own_denominator, own_token_weights

if TYPE_CHECKING:
    from tepo_megatron.config.objective.choices import Aggregation


def token_weights(aggregation: Aggregation, mask_T: Tensor, lengths_S: Tensor, index_T: Tensor) -> Tensor:
    """The weight of each token in the numerator, [T]: 0 outside the mask, else 1, or 1/T_i for a mean of sequence means."""
    if isinstance(aggregation, OwnAggregation):
        return own_token_weights(aggregation, lengths_S, index_T, mask_T)
    if aggregation.kind != "sequence_mean":
        return mask_T.to(lengths_S.dtype)
    return mask_T / lengths_S.clamp(min=1)[index_T]


def step_denominator(aggregation: Aggregation, lengths_S: Tensor) -> Tensor:
    """What the numerators of all micro-batches and ranks are divided by, once; a scalar.

    ``lengths_S`` counts the response tokens of every sequence of the optimizer step, all data-parallel ranks'. Sequences
    without one (padding) do not count.

    Raises:
        ValueError: the step has no response token.
    """
    sequences = (lengths_S > 0).sum().to(lengths_S.dtype)
    if not sequences:
        raise ValueError("no sequence of this optimizer step has a response token; leave the step out, or look at loss_mask_T")
    if isinstance(aggregation, OwnAggregation):
        return own_denominator(aggregation, lengths_S)
    if aggregation.kind == "token_mean":
        return lengths_S.sum()
    if aggregation.kind == "sequence_mean":
        return sequences
    return aggregation.constant * (sequences if aggregation.per == "sequence" else torch.ones_like(sequences))
