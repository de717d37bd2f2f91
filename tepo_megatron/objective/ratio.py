"""Ratios of the policy to the policy before the update, at three levels. S sequences, T packed tokens.

Formulas: docs/tepo.md, "Sequence likelihood". δ = log π_θ − log π_old at the sampled token, 0 outside the loss mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from tepo_megatron.config.objective_choices import Ratio

Reduce = Callable[[Tensor], Tensor]
"""Sums a [S] tensor over the ranks that hold other tokens of the same sequences, and sums its gradient over them likewise."""


def sequence_sum(values_T: Tensor, sequence_index_T: Tensor, num_sequences: int, reduce: Reduce | None = None) -> Tensor:
    """Sum of the token values of each sequence: [T] in, [S] out, differentiable.

    Where a sequence's tokens are spread over context-parallel ranks, all of them call this with their own tokens, the same S,
    and a ``reduce`` whose backward is an all-reduce too: each rank's loss holds only its own tokens, so the gradient of a
    sequence's sum is the sum of what the ranks ask for.
    """
    sums_S = values_T.new_zeros(num_sequences).index_add(0, sequence_index_T, values_T)
    return sums_S if reduce is None else reduce(sums_S)


def policy_ratio(ratio: Ratio, delta_T: Tensor, lengths_S: Tensor, index_T: Tensor, reduce: Reduce | None = None) -> Tensor:
    """The ratio at every token, [T], differentiable in ``delta_T``.

    - ``token``: exp δ_it.
    - ``sequence``: s_i = exp(Σ_t δ_it / T_i) at every token of sequence i (equation 3), or exp(Σ_t δ_it) un-normalised.
    - ``sequence_token``: sg[s_i] · exp(δ_it − sg[δ_it]), the same value, through which each token gets its own gradient
      (equation 4).

    ``lengths_S`` counts response tokens of the whole sequences, T_i.
    """
    if ratio.kind == "token":
        return delta_T.exp()
    sums_S = sequence_sum(delta_T, index_T, lengths_S.numel(), reduce)
    log_ratio_S = sums_S / lengths_S.clamp(min=1) if ratio.length_normalized else sums_S
    log_ratio_T = log_ratio_S[index_T]
    if ratio.kind == "sequence_token":
        # the bracket is 0 in value and 1 in gradient: log s_i for the value, the token's own δ for the gradient
        log_ratio_T = log_ratio_T.detach() + (delta_T - delta_T.detach())
    return log_ratio_T.exp()
