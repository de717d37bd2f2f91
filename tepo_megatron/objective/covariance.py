"""The covariance of log-probability and advantage, token by token, and choices made by it (TEPO.md §4, §5, §7).

c_it = (log π_old,it − mean)(A_i − mean), means over all response tokens of the optimizer step. Reading: of π_old, from which
the tokens were drawn, so that the choice is one for the whole step, however it is cut into micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor


def covariance_statistic(logprob_T: Tensor, advantage_T: Tensor, logprob_mean: Tensor, advantage_mean: Tensor) -> Tensor:
    """c [T]; only element-wise operations, so a token's value is the same in every micro-batch, bit for bit."""
    return (logprob_T - logprob_mean) * (advantage_T - advantage_mean)


def exact_mean(values_T: Tensor) -> Tensor:
    """The mean in fp64, rounded back, so that equal fp32 values have a mean equal to them; a scalar."""
    return values_T.double().mean().to(values_T.dtype)


def largest_threshold(covariance_T: Tensor, fraction: float) -> Tensor:
    """The smallest of the ``fraction`` largest values, of one at least (KL-Cov)."""
    return covariance_T.topk(_count(fraction, covariance_T.numel())).values[-1]


def lottery_threshold(candidates_T: Tensor, tickets_T: Tensor, fraction: float) -> int:
    """The highest ticket that wins when a ``fraction`` of all tokens is to be drawn from the candidates; −1 without any."""
    drawn = tickets_T[candidates_T].sort().values[: _count(fraction, candidates_T.numel())]
    return int(drawn[-1]) if drawn.numel() else -1


def tickets(logprob_T: Tensor, advantage_T: Tensor, labels_T: Tensor) -> Tensor:
    """A pseudo-random number in [0, 2³²) for each token, int64, from what the token is and not from where it stands.

    So the lottery of Clip-Cov draws the same tokens whatever the order of the sequences, the micro-batches and the ranks, and
    again after a resume.
    """
    hashed_T = torch.zeros_like(labels_T)
    for part_T in (labels_T, logprob_T.float().view(torch.int32).long(), advantage_T.float().view(torch.int32).long()):
        hashed_T = (hashed_T ^ part_T) & 0xFFFFFFFF
        for shift, factor in ((16, 0x45D9F3B), (15, 0x119DE1F3)):  # below 2³¹, so that products stay within int64
            hashed_T = ((hashed_T ^ (hashed_T >> shift)) * factor) & 0xFFFFFFFF
        hashed_T = hashed_T ^ (hashed_T >> 16)
    return hashed_T


def _count(fraction: float, tokens: int) -> int:
    return min(max(int(fraction * tokens), 1), tokens)
