"""Estimators of accuracy from n samples of a problem: of which c are correct, or which agree in their answers."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import comb, prod


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


def maj_at_k(answers: Sequence[tuple[int, int]], num_samples: int, k: int) -> float:
    """Estimates the accuracy of the most frequent answer of k samples: an unbiased estimate from n >= k samples.

    It is the mean over the k-element subsets of the samples. Where several answers are the most frequent of a subset, each
    counts the same share, as if one of them were drawn. A sample without an answer has no vote, and a subset in which none has
    one is wrong.

    Args:
        answers: of each different answer, (samples that gave it, how many of these are correct).
        num_samples: n, with the samples that gave no answer.
        k: samples that vote.

    Raises:
        ValueError: more votes than samples, more correct ones than votes, or not 1 <= k <= n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"maj@{k} cannot be estimated from {num_samples} samples; draw at least k, with k at least 1")
    counts = [count for count, _ in answers]
    silent = num_samples - sum(counts)
    if silent < 0 or any(not 0 <= correct <= count or count < 1 for count, correct in answers):
        raise ValueError(f"the answers {list(answers)} are not possible among {num_samples} samples")
    wins = {count: _chance_to_win(count, counts, silent, k) for count in set(counts)}
    return sum(wins[count] * correct / count for count, correct in answers)


def _chance_to_win(own: int, counts: Sequence[int], silent: int, k: int) -> float:
    """Of an answer that ``own`` samples gave, in a random k-element subset; a tie counts as its share.

    For each number m of its votes, the subsets in which no other answer has more are counted by a polynomial: ``ways[t][s]``
    are the ways to take s of the others' samples such that t answers also have m.
    """
    others = list(counts)
    others.remove(own)
    chance = Fraction()  # the numbers of subsets pass what a float holds
    for votes in range(1, min(own, k) + 1):
        room = k - votes
        ways = {0: [comb(silent, size) for size in range(room + 1)]}
        for count in others:
            ways = _take_from(count, ways, votes, room)
        favourable = sum(Fraction(sizes[room], 1 + ties) for ties, sizes in ways.items())
        chance += comb(own, votes) * favourable
    return float(chance / comb(sum(counts) + silent, k))


def _take_from(count: int, ways: dict[int, list[int]], votes: int, room: int) -> dict[int, list[int]]:
    """The ways with up to ``votes`` of one more answer's ``count`` samples."""
    found: dict[int, list[int]] = {}
    for ties, sizes in ways.items():
        for taken in range(min(count, votes, room) + 1):
            into = found.setdefault(ties + (taken == votes), [0] * (room + 1))
            of_this = comb(count, taken)
            for size in range(room + 1 - taken):
                into[size + taken] += of_this * sizes[size]
    return found


def _check(num_samples: int, num_correct: int) -> None:
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} correct of {num_samples} samples is not possible")
