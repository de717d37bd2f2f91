"""The order of problems, of one source or several: the quota of each, a restored state, and orders by the user's function."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.data import DataConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.sources import ProblemSampler, make_sampler

weights = st.lists(st.one_of(st.integers(1, 9), st.sampled_from([0.1, 0.25, 0.7, 2.5])), max_size=5)
sizes = st.integers(1, 7)


def make(shares: list[float], count: int = 5, seed: int = 0, answer: str = "a") -> ProblemSampler:
    """Sources of count, count + 1, … problems; without shares, one file."""
    sources = [{"path": f"s{index}.jsonl", "weight": share} for index, share in enumerate(shares)]
    problems = [
        Problem(f"s{index}/{number}", "q" * (count - number), answer, source=f"s{index}" if shares else "")
        for index in range(len(shares) or 1)
        for number in range(count + index)
    ]
    data = DataConfig.model_validate({"train": sources or "s0.jsonl", "heldout": None})
    return make_sampler(problems, data, seed)


@given(shares=weights.filter(bool), draws=st.integers(1, 80))
def test_after_any_number_of_draws_each_source_has_its_share_rounded_down_or_up(shares: list[float], draws: int) -> None:
    sampler, total = make(shares), sum(shares)
    counts: Counter[str] = Counter()
    for drawn in range(1, draws + 1):
        counts[sampler.next(1)[0].source] += 1
        for index, share in enumerate(shares):
            assert abs(counts[f"s{index}"] - drawn * share / total) < 1 - 1e-9 or drawn * share % total == 0
    assert sampler.drawn == draws


@given(shares=weights, count=sizes, seed=st.integers(), draws=st.lists(st.integers(0, 30), max_size=8))
def test_each_source_comes_in_its_own_passes_however_it_is_drawn(
    shares: list[float], count: int, seed: int, draws: list[int]
) -> None:
    sampler = make(shares, count, seed)
    drawn = [problem for n in draws for problem in sampler.next(n)]
    assert len(drawn) == sum(draws)
    assert drawn == make(shares, count, seed).next(len(drawn))
    assert [make(shares, count, seed).problem(number) for number in range(len(drawn))] == drawn
    for index in range(len(shares) or 1):
        ids = [problem.id for problem in drawn if problem.id.startswith(f"s{index}/")]
        for start in range(0, len(ids), count + index):
            epoch = ids[start : start + count + index]
            assert len(set(epoch)) == len(epoch)


@given(shares=weights, count=sizes, before=st.lists(st.integers(0, 40), max_size=3), after=st.integers(0, 20))
def test_a_restored_order_continues_exactly(shares: list[float], count: int, before: list[int], after: int) -> None:
    sampler = make(shares, count)
    for n in before:
        sampler.next(n)
    restored = make(shares, count)
    restored.next(3)
    restored.restore(json.loads(json.dumps(sampler.state())))
    assert restored.state() == sampler.state()
    assert restored.next(after) == sampler.next(after)


def test_a_state_at_the_end_of_an_epoch_may_name_either_epoch() -> None:
    sampler, other = make([]), make([])
    sampler.next(5)
    other.restore({**sampler.state(), "epoch": 0, "position": 5})
    assert other.next(7) == sampler.next(7)


@pytest.mark.parametrize(
    ("saved", "others", "refusal"),
    [
        (
            [1, 2],
            [{"shares": [2, 1]}, {"answer": "b"}, {"count": 6}],
            r"the sources of data\.train .* are not those of the check",
        ),
        ([], [{"answer": "b"}, {"count": 6}], "the training problems are not those of the checkpoint"),
    ],
)
def test_foreign_states_are_refused(saved: list[float], others: list[dict[str, object]], refusal: str) -> None:
    state = make(saved).state()
    for changes in others:
        with pytest.raises(ValueError, match=refusal):
            make(**{"shares": saved, **changes}).restore(state)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has seed 0, this run has seed = 1"):
        make(saved, seed=1).restore(state)


def test_epochs_seeds_and_sources_of_the_same_size_are_shuffled_differently() -> None:
    def numbers(*ids: str) -> tuple[str, ...]:
        return tuple(name.partition("/")[2] for name in ids)

    one, other = make([], 30), make([], 30, seed=1)
    epochs = {numbers(*(problem.id for problem in sampler.next(30))) for sampler in (one, one, other)}
    problems = [Problem(f"s{index}/{number}", "q", "a", source=f"s{index}") for index in range(2) for number in range(30)]
    data = DataConfig.model_validate({"train": [{"path": "s0"}, {"path": "s1"}], "heldout": None})
    drawn = [problem.id for problem in make_sampler(problems, data, 0).next(60)]
    epochs |= {numbers(*(name for name in drawn if name.startswith(source))) for source in ("s0", "s1")}
    assert len(epochs | {tuple(map(str, range(30)))}) == 6


def test_order_is_the_same_on_every_machine() -> None:
    problems = [Problem(f"p{number}", f"q{number}", "a") for number in range(6)]
    assert [problem.id for problem in ProblemSampler(problems, 7).next(12)] == ORDER
    with pytest.raises(ValueError, match="at least one problem"):
        ProblemSampler([], 0)


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


ORDER = ["p2", "p4", "p5", "p1", "p0", "p3", "p0", "p1", "p2", "p4", "p3", "p5"]
