import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.sources import ProblemSampler


def _problems(n: int, answer: str = "a") -> list[Problem]:
    return [Problem(f"p{i}", f"q{i}", answer) for i in range(n)]


sizes = st.integers(1, 40)
draws = st.lists(st.integers(0, 30), max_size=12)


@given(size=sizes, seed=st.integers(), ns=draws)
def test_every_epoch_is_a_permutation_however_it_is_drawn(size: int, seed: int, ns: list[int]) -> None:
    sampler = ProblemSampler(_problems(size), seed)
    batches = [sampler.next(n) for n in ns]
    assert [len(batch) for batch in batches] == ns
    drawn = [problem.id for batch in batches for problem in batch]
    assert drawn == [problem.id for problem in ProblemSampler(_problems(size), seed).next(len(drawn))]
    for at in range(0, len(drawn), size):
        epoch = Counter(drawn[at : at + size])
        assert max(epoch.values()) == 1


@given(size=sizes, seed=st.integers(), before=draws, after=draws)
def test_restored_sampler_goes_on_exactly(size: int, seed: int, before: list[int], after: list[int]) -> None:
    sampler = ProblemSampler(_problems(size), seed)
    for n in before:
        sampler.next(n)
    restored = ProblemSampler(_problems(size), seed)
    restored.next(size // 2)
    restored.restore(json.loads(json.dumps(sampler.state())))
    assert restored.state() == sampler.state()
    for n in after:
        assert restored.next(n) == sampler.next(n)


def test_epochs_and_seeds_differ() -> None:
    problems = _problems(50)
    sampler = ProblemSampler(problems, 0)
    first, second = sampler.next(50), sampler.next(50)
    assert len({tuple(first), tuple(second), tuple(ProblemSampler(problems, 1).next(50)), tuple(problems)}) == 4


def test_order_is_the_same_on_every_machine() -> None:
    assert [problem.id for problem in ProblemSampler(_problems(6), 7).next(12)] == ORDER


def test_foreign_states_are_refused() -> None:
    state = ProblemSampler(_problems(5), 0).state()
    with pytest.raises(ValueError, match="not those of the checkpoint"):
        ProblemSampler(_problems(5, answer="b"), 0).restore(state)
    with pytest.raises(ValueError, match="has seed 0, this run has seed = 1"):
        ProblemSampler(_problems(5), 1).restore(state)


def test_no_problem() -> None:
    with pytest.raises(ValueError, match="at least one problem"):
        ProblemSampler([], 0)


ORDER = ["p2", "p4", "p5", "p1", "p0", "p3", "p0", "p1", "p2", "p4", "p3", "p5"]
