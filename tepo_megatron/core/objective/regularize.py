"""KL of single tokens, and the coefficient of the entropy bonus. All values [T]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tepo_megatron.config.objective.terms import EntropyBonus, KLTerm


def kl_estimate(difference_T: Tensor, estimator: Literal["k1", "k2", "k3", "abs"]) -> Tensor:
    """Per-token estimate of KL(π_θ‖q) for tokens drawn from π_θ; ``difference_T`` is d = log π_θ − log q at the drawn token.

    k1 = d (unbiased), k2 = d²/2, k3 = exp(−d) − 1 + d (unbiased, never negative), abs = |d|.
    """
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return difference_T**2 / 2
    if estimator == "k3":  # expm1: at a small d, exp(−d) − 1 in fp32 would lose most of its digits
        return torch.expm1(-difference_T) + difference_T
    return difference_T.abs()


def kl_penalty(term: KLTerm, delta_T: Tensor, reference_delta_T: Tensor | None) -> Tensor:
    """The KL values of one term, not yet masked nor multiplied by its coefficient.

    ``delta_T`` is log π_θ − log π_old, ``reference_delta_T`` log π_θ − log π_ref. With ``weight = importance`` the estimate is
    multiplied by exp(δ), gradient included: then its mean over tokens of π_old is that of the estimator over tokens of π_θ.
    For k3 against π_old that is r δ − r + 1, unbiased for KL(π_θ‖π_old) (docs/reference/tepo.md, equation 8).
    """
    difference_T = delta_T if term.against == "old" else reference_delta_T
    assert difference_T is not None
    value_T = kl_estimate(difference_T, term.estimator)
    return value_T * delta_T.exp() if term.weight == "importance" else value_T


def entropy_coefficient(bonus: EntropyBonus | None, old_entropy_mean: Tensor | None) -> float:
    """The coefficient for one optimizer step; ``adaptive`` falls as the mean entropy of π_old rises (equation 13)."""
    if bonus is None:
        return 0.0
    if bonus.kind == "fixed":
        return bonus.coefficient
    if old_entropy_mean is None:
        raise ValueError("objective.entropy.kind = 'adaptive' needs old_entropy_T; score the batch before the step")
    return bonus.coefficient * min(max(1 - old_entropy_mean.item() / bonus.target, 0.0), 1.0)
