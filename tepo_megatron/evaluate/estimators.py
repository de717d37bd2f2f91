"""Estimators of accuracy from n samples of a problem, c of them correct."""

from __future__ import annotations

from math import prod


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimates the probability that at least one of k samples is correct: an unbiased estimate from n >= k samples.

    It is the share of the k-element subsets of the samples that contain a correct one, 1 - C(n - c, k) / C(n, k), written as
    a product so that no binomial is formed (Chen et al. 2021, "Evaluating Large Language Models Trained on Code").

    Raises:
        ValueError: not 0 <= c <= n, or not 1 <= k <= n.
    """
    _check(num_samples, num_correct)
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {num_samples} samples; draw at least k, with k at least 1")
    wrong = num_samples - num_correct
    return 1.0 - prod(max(wrong - i, 0) / (num_samples - i) for i in range(k))


def avg_at_k(num_samples: int, num_correct: int) -> float:
    """Returns the share of correct samples: the accuracy of one sample, averaged over k of them.

    Raises:
        ValueError: there is no sample, or not 0 <= c <= n.
    """
    _check(num_samples, num_correct)
    if num_samples == 0:
        raise ValueError("avg@k needs at least one sample")
    return num_correct / num_samples


def _check(num_samples: int, num_correct: int) -> None:
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} correct of {num_samples} samples is not possible")
