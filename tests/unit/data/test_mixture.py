"""Several sources in one order: the quota of each, a restored state, and orders by a function of the user's."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.data import DataConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.sources import MixedSampler, make_sampler, whole_weights

weights = st.lists(st.one_of(st.integers(1, 9), st.sampled_from([0.1, 0.25, 0.7, 2.5])), min_size=1, max_size=5)
sizes = st.integers(1, 7)


def problems(name: str, count: int, answer: str = "a") -> list[Problem]:
    return [Problem(f"{name}/{at}", "q" * (count - at), answer, source=name) for at in range(count)]


def data(shares: list[float], order: str = "shuffled") -> DataConfig:
    sources = [{"path": f"s{at}.jsonl", "weight": share} for at, share in enumerate(shares)]
    return DataConfig.model_validate({"train": sources, "heldout": None, "order": order})


def mixed(shares: list[float], count: int = 5, seed: int = 0, answer: str = "a") -> MixedSampler:
    every = [problem for at in range(len(shares)) for problem in problems(f"s{at}", count + at, answer)]
    made = make_sampler(every, data(shares), seed)
    assert isinstance(made, MixedSampler)
    return made


@given(shares=weights, draws=st.integers(1, 80))
def test_after_any_number_of_draws_each_source_has_its_share_rounded_down_or_up(shares: list[float], draws: int) -> None:
    sampler, total = mixed(shares), sum(shares)
    counts: Counter[str] = Counter()
    for drawn in range(1, draws + 1):
        counts[sampler.next(1)[0].source] += 1
        for at, share in enumerate(shares):
            assert abs(counts[f"s{at}"] - drawn * share / total) < 1 - 1e-9 or drawn * share % total == 0
    assert sampler.drawn == draws


def test_a_step_has_exactly_its_shares_where_they_are_whole() -> None:
    sampler = mixed([3, 1])
    for _ in range(10):
        assert Counter(problem.source for problem in sampler.next(8)) == {"s0": 6, "s1": 2}


@given(shares=weights, count=sizes, seed=st.integers(0, 3), draws=st.lists(st.integers(0, 9), max_size=6))
def test_each_source_comes_in_its_own_passes_and_in_any_order_of_asking(
    shares: list[float], count: int, seed: int, draws: list[int]
) -> None:
    one, whole = mixed(shares, count, seed), mixed(shares, count, seed)
    drawn = [problem for n in draws for problem in one.next(n)]
    assert drawn == whole.next(len(drawn))
    assert [mixed(shares, count, seed).problem(number) for number in range(len(drawn))] == drawn
    for at in range(len(shares)):
        own = [problem.id for problem in drawn if problem.source == f"s{at}"]
        for start in range(0, len(own), count + at):
            epoch = own[start : start + count + at]
            assert len(set(epoch)) == len(epoch)


@given(shares=weights, count=sizes, before=st.integers(0, 40), after=st.integers(0, 20))
def test_a_restored_order_goes_on_exactly(shares: list[float], count: int, before: int, after: int) -> None:
    sampler = mixed(shares, count)
    sampler.next(before)
    restored = mixed(shares, count)
    restored.next(3)
    restored.restore(json.loads(json.dumps(sampler.state())))
    assert restored.state() == sampler.state()
    assert restored.next(after) == sampler.next(after)


def test_foreign_states_are_refused() -> None:
    state = mixed([1, 2]).state()
    for other in (mixed([2, 1]), mixed([1, 2], answer="b"), mixed([1, 2], count=6)):
        with pytest.raises(ValueError, match=r"the sources of data\.train .* are not those of the checkpoint"):
            other.restore(state)
    with pytest.raises(ValueError, match="has seed 0, this run has seed = 1"):
        mixed([1, 2], seed=1).restore(state)


def test_sources_of_the_same_size_are_not_shuffled_alike() -> None:
    every = [*problems("s0", 30), *problems("s1", 30)]
    drawn = make_sampler(every, data([1, 1]), 0).next(60)
    first, second = ([problem.id.partition("/")[2] for problem in drawn if problem.source == name] for name in ("s0", "s1"))
    assert first != second


@given(weights)
def test_weights_are_the_numbers_that_are_written(shares: list[float]) -> None:
    whole = whole_weights(shares)
    assert all(type(each) is int and each > 0 for each in whole)
    assert [each / sum(whole) for each in whole] == pytest.approx([each / sum(shares) for each in shares])
    assert whole_weights([0.1, 0.2]) == [1, 2]


def test_orders(tmp_path: Path) -> None:
    own = tmp_path / "orders.py"
    own.write_text(
        "def level(problem):\n    return problem.metadata['level']\n\ndef none(problem):\n    return float('nan')\n\n"
        "def broken(problem):\n    return problem.grade\n"
    )
    every = [Problem(f"p{at}", "q" * (9 - at), "a", {"level": at % 3}) for at in range(9)]

    def ids(order: str, passes: int = 1) -> list[str]:
        config = DataConfig(order=order)
        return [problem.id for problem in make_sampler(every, config, 0).next(9 * passes)]

    given_order = [f"p{at}" for at in range(9)]
    assert ids("as_given", 2) == given_order * 2
    assert ids("shortest_first") == given_order[::-1]
    assert sorted(ids("shuffled")) == given_order != ids("shuffled")
    easiest = ids(f"{own}:level", 2)
    for each in (easiest[:9], easiest[9:]):
        assert [int(name[1:]) % 3 for name in each] == [0] * 3 + [1] * 3 + [2] * 3
    assert easiest[:9] != easiest[9:]  # equal ones are shuffled anew
    for name, message in (
        (f"{own}:none", "returned nan for problem 'p0'; return a finite number"),
        (f"{own}:broken", "raised AttributeError on problem 'p0'"),
        (f"{own}:nothing", "has no function nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            ids(name)
    other = make_sampler(every, DataConfig(order="as_given"), 0)
    with pytest.raises(ValueError, match="not those of the checkpoint"):  # another order is another run
        other.restore(make_sampler(every, DataConfig(), 0).state())
