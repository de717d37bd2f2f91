"""Intervals hold what they say: coverage by simulation, widths by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tepo_megatron.tasks.evaluate.estimators import bootstrap

RUNS = 1500
"""Simulated evaluations; the share of them that an interval holds the true mean in has a standard error of 0.6 %."""


@pytest.mark.parametrize(
    ("problems", "samples", "beta"),
    [(30, 16, (1.0, 2.0)), (100, 1, (2.0, 2.0)), (272, 4, (0.7, 0.7))],
    ids=["30 problems, avg@16", "100 problems, greedy", "272 problems, avg@4"],
)
def test_an_interval_holds_the_true_mean_in_95_percent_of_evaluations(
    problems: int, samples: int, beta: tuple[float, float]
) -> None:
    """Problems of all difficulties, drawn anew each time, each answered several times: 95 % within 2."""
    random = np.random.default_rng(7)
    truth = beta[0] / sum(beta)
    held = 0
    for seed in range(RUNS):
        chances = random.beta(*beta, problems)
        found = bootstrap(random.binomial(samples, chances) / samples, resamples=300, seed=seed)
        held += found.low <= truth <= found.high
    assert held / RUNS == pytest.approx(0.95, abs=0.02)


def test_a_paired_difference_is_held_too() -> None:
    """Two models on the same problems: the differences are far narrower than either's own interval."""
    random = np.random.default_rng(3)
    held = 0
    for seed in range(RUNS):
        chances = random.beta(1.0, 1.0, 60) * 0.9
        one, other = (random.binomial(8, chances + gain) / 8 for gain in (0.0, 0.1))
        found = bootstrap(other - one, resamples=300, seed=seed)
        held += found.low <= 0.1 <= found.high
    assert held / RUNS == pytest.approx(0.95, abs=0.02)
    alone = bootstrap(one)
    assert found.high - found.low < 0.8 * (alone.high - alone.low)


def test_it_is_close_to_students_interval_where_that_is_right() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 40)
    half = 2.023 * values.std(ddof=1) / 40**0.5
    found = bootstrap(values, resamples=20000)
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.06)
    assert bootstrap(values) == bootstrap(values)


def test_where_all_problems_are_the_same() -> None:
    """No problem of 30 solved: the true share may still be 1 - 0.025^(1/30), about 12 %."""
    none = bootstrap([0.0] * 30, share=True)
    assert (none.mean, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(0.1157, abs=1e-4)
    assert bootstrap([1.0] * 30, share=True).low == pytest.approx(1 - none.high)
    assert bootstrap([5.0] * 3) == bootstrap([5.0] * 3, share=True)
    assert bootstrap([5.0] * 3).high == 5.0


@pytest.mark.parametrize("values", [[], [0.5, float("nan")]])
def test_what_has_no_interval(values: list[float]) -> None:
    with pytest.raises(ValueError, match="an interval needs"):
        bootstrap(values)
