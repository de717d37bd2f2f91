from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb, prod
from statistics import NormalDist

import numpy as np
import numpy.typing as npt


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate 1 - C(n - c, k) / C(n, k) for k <= n (Chen et al. 2021, arXiv 2107.03374)."""
    wrong = num_samples - num_correct
    return 1.0 - prod(max(wrong - i, 0) / (num_samples - i) for i in range(k))


def maj_at_k(answers: Sequence[tuple[int, int]], num_samples: int, k: int) -> float:
    """Unbiased: the mean over all k-subsets, k <= n. Ties share, and a subset without votes is wrong. ``answers``:
    (samples, correct samples) of each distinct answer; ``num_samples`` includes samples without one.
    """
    counts = [count for count, _ in answers]
    if k == num_samples:  # one subset, as by default; to count it as below takes seconds for hundreds of samples
        most = max(counts, default=0)
        shares = [correct / count for count, correct in answers if count == most]
        return sum(shares) / len(shares) if shares else 0.0
    silent = num_samples - sum(counts)
    wins = {count: _chance_to_win(count, counts, silent, k) for count in set(counts)}
    return sum(wins[count] * correct / count for count, correct in answers)


def _chance_to_win(count: int, counts: Sequence[int], silent: int, k: int) -> float:
    """For each number m of its votes, ``ways[t][s]`` counts draws of s others in which t answers have m and none more."""
    others = list(counts)
    others.remove(count)
    chance = Fraction()  # the numbers of subsets exceed a float's range
    for votes in range(1, min(count, k) + 1):
        room = k - votes
        ways = {0: [comb(silent, size) for size in range(room + 1)]}
        for other in others:
            ways = _take_from(other, ways, votes, room)
        favourable = sum(Fraction(sizes[room], 1 + ties) for ties, sizes in ways.items())
        chance += comb(count, votes) * favourable
    return float(chance / comb(sum(counts) + silent, k))


def _take_from(count: int, ways: dict[int, list[int]], votes: int, room: int) -> dict[int, list[int]]:
    extended: dict[int, list[int]] = {}
    for ties, sizes in ways.items():
        for taken in range(min(count, votes, room) + 1):
            into = extended.setdefault(ties + (taken == votes), [0] * (room + 1))
            of_this = comb(count, taken)
            for size in range(room + 1 - taken):
                into[size + taken] += of_this * sizes[size]
    return extended


_CHUNK = 4_000_000  # bounds the memory
_TAIL = (1 - 0.95) / 2

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)  # Student's t at 97.5 % from 1 degree of freedom; beyond 30, 1.96 is at most 4 % too small


def t_975(freedom: int) -> float:
    return T_975[freedom - 1] if freedom <= len(T_975) else 1.96


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float
    problems: int

    @property
    def excludes_zero(self) -> bool:
        """Below six problems no sign test reaches 5 %, and equal values would give a point."""
        return self.problems > 5 and (self.low > 0 or self.high < 0)


def bootstrap(
    values: Sequence[float] | npt.NDArray[np.float64], *, resamples: int = 4000, seed: int = 0, share: bool = False
) -> Interval:
    """The 95 % percentile interval, widened to the tails of Student's t with n - 1 degrees of freedom and by sqrt(n / (n - 1)):
    it is too narrow for few problems (Hesterberg 2015, "What Teachers Should Know About the Bootstrap"). Equal values
    give a point, or for a ``share`` of 0 or 1 a one-sided binomial interval.
    """
    array = np.asarray(values, dtype=np.float64)
    if not array.size or not np.isfinite(array).all():
        raise ValueError("an interval needs at least one figure, and all of them finite")
    count, mean = array.size, float(array.mean())
    if np.all(array == array[0]):
        open_side = 1 - _TAIL ** (1 / count) if share and mean in (0.0, 1.0) else 0.0
        return Interval(mean, mean - open_side * mean, mean + open_side * (1 - mean), count)
    random, rows = np.random.default_rng(seed), max(1, _CHUNK // count)
    draws = (random.integers(0, count, (min(rows, resamples - done), count)) for done in range(0, resamples, rows))
    means = np.concatenate([array[drawn].mean(axis=1) for drawn in draws])
    freedom, z, t = count - 1, NormalDist().inv_cdf(1 - _TAIL), t_975(count - 1)
    if freedom > len(T_975):  # Cornish-Fisher, within 1e-4
        t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    # With few problems t exceeds every share of the resamples: the ends are then the outermost ones.
    wide = NormalDist().cdf(-t * (count / freedom) ** 0.5)
    low, high = np.quantile(means, [wide, 1 - wide])
    return Interval(mean, float(low), float(high), count)
