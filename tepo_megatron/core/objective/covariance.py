"""The covariance of log-probability and advantage, token by token (docs/reference/tepo.md, equation 10).

c_it = (log π_old(y_it) − mean)(A_i − mean), means over all response tokens of the optimizer step. That it is π_old,
from which the tokens were drawn, is our interpretation: so a choice made by c is one for the whole step, however it is cut.
"""

from __future__ import annotations

from torch import Tensor


def covariance_statistic(logprob_T: Tensor, advantage_T: Tensor, logprob_mean: Tensor, advantage_mean: Tensor) -> Tensor:
    """c [T]; only element-wise operations, so a token's value is the same in every micro-batch, bit for bit."""
    return (logprob_T - logprob_mean) * (advantage_T - advantage_mean)


def exact_mean(values_T: Tensor) -> Tensor:
    """The mean in fp64, rounded back, so that equal fp32 values have a mean equal to them; a scalar.

    Otherwise c would be a rounding error instead of 0 where all advantages are equal, and its sign would choose tokens.
    """
    return values_T.double().mean().to(values_T.dtype)


def token_count(fraction: float, tokens: int) -> int:
    """How many tokens a ``fraction`` of them is: rounded down, at least one, at most all."""
    return min(max(int(fraction * tokens), 1), tokens)
