"""Responses submitted one by one, as they come, and polled as they are scored."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.pool import RewardPool

VERIFIER = '''
import json, os, signal, time

def judge(problem, response):
    """The number in the response, times the problem's factor."""
    with open(os.environ["TRIES"], "a") as file:
        file.write(response + "\\n")
    if response == "sleep":
        time.sleep(600)
    if response == "raise":
        raise KeyError("boom")
    return float(response) * problem.metadata.get("factor", 1)

def score_group(problem, responses):
    """The rank of each in its group, and how many there are."""
    numbers = [float(each) for each in responses]
    return [{"rank": float(sorted(numbers).index(each)), "size": len(numbers)} for each in numbers]
'''


@pytest.fixture
def tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stream_rewards.py").write_text(VERIFIER)
    monkeypatch.setenv("TRIES", str(tmp_path / "tries"))
    (tmp_path / "tries").touch()
    return tmp_path / "tries"


def pool_of(tries: Path, function: str = "judge", **options: object) -> RewardPool:
    verifier = f"{tries.parent}/stream_rewards.py:{function}"
    return RewardPool(RewardConfig.model_validate({"verifier": verifier, "workers": 2, "network": False, **options}))


@pytest.fixture
def pool(tries: Path) -> Iterator[RewardPool]:
    with pool_of(tries) as pool:
        yield pool


def drain(pool: RewardPool) -> list[tuple[Hashable, RewardResult]]:
    """Polls until nothing is under way."""
    results: list[tuple[Hashable, RewardResult]] = []
    while found := pool.poll(None):
        results += found
    return results


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.floats(-1e6, 1e6) | st.just("raise"), max_size=60), seed=st.integers(0, 99))
def test_each_comes_back_once_with_its_own_reward(pool: RewardPool, values: list[float | str], seed: int) -> None:
    """Submitting and polling in any order gives what scoring all at once gives, failures and repeats included."""
    rng = random.Random(seed)
    items = [
        (Problem(f"p{n}", "q", "a", {"factor": 2}), value if value == "raise" else repr(value))
        for n, value in enumerate(values)
    ]
    items += items[::3]
    pool.reset()
    got: list[tuple[Hashable, RewardResult]] = []
    for number, (problem, text) in enumerate(items):
        pool.submit(("key", number), problem, text)
        if rng.random() < 0.3:
            got += pool.poll(rng.choice([0.0, 0.01]))
        assert pool.unfinished == number + 1 - len(got)
    got += drain(pool)
    assert pool.unfinished == 0
    assert pool.poll(None) == []
    assert sorted(key for key, _ in got) == [("key", number) for number in range(len(items))]  # type: ignore[type-var]
    assert [result for _, result in sorted(got, key=lambda each: each[0])] == pool.score(items)  # type: ignore[arg-type, return-value]
    for (_, number), result in got:  # type: ignore[misc]
        value = items[number][1]
        assert result.reward == (None if value == "raise" else 2 * float(value))


def test_what_fails_is_tried_once_also_where_it_comes_later(tries: Path, pool: RewardPool) -> None:
    for round_ in range(3):
        pool.submit(round_, Problem("p", "q", "a"), "raise")
        ((_, result),) = drain(pool)
        assert result.error is not None
        assert "raised KeyError: 'boom'" in result.error
    assert tries.read_text() == "raise\n"


def test_responses_that_a_verifier_can_tell_apart_are_each_tried(tries: Path, pool: RewardPool) -> None:
    problem, other = Problem("p", "q", "a"), Problem("p", "q", "a", {"factor": 3})
    kinds: list[tuple[tuple[int, ...], str]] = [((), "stop"), ((), "length"), ((5,), "stop"), ((6,), "stop")]
    texts = [ResponseText("raise", ids, reason) for ids, reason in kinds]
    for number, (one, text) in enumerate([*((problem, text) for text in texts), (other, texts[0])]):
        pool.submit(number, one, text)
    assert len(drain(pool)) == 5
    assert tries.read_text() == "raise\n" * 5


def test_a_reset_drops_what_is_under_way(tries: Path) -> None:
    with pool_of(tries, timeout_s=2.0) as pool:
        for number in range(4):
            pool.submit(("old", number), Problem(f"p{number}", "q", "a"), "sleep")
        pool.submit(("old", 9), Problem("p9", "q", "a"), "5")
        pool.reset()
        assert pool.unfinished == 0
        pool.submit("new", Problem("p", "q", "a"), "7")
        assert drain(pool) == [("new", RewardResult(7.0))]
        assert pool.score([(Problem("p", "q", "a"), "8")]) == [RewardResult(8.0)]


def test_a_group_is_scored_when_it_is_whole(tries: Path) -> None:
    with pool_of(tries, "score_group") as pool:
        assert pool.scores_groups
        members = [(group, number) for group in "ab" for number in range(3)]
        random.Random(1).shuffle(members)
        for group, number in members:
            text = ResponseText(str(10 - number))
            pool.submit((group, number), Problem(f"p{group}", "q", "a"), text, group=group, group_size=3)
        pool.submit("early", Problem("pc", "q", "a"), "1", group="c", group_size=2)
        results = dict(drain(pool))
        assert {key: result.parts for key, result in results.items()} == {
            (group, number): {"rank": 2.0 - number, "size": 3.0} for group, number in members
        }
        assert results["a", 0].reward == 5.0
        assert pool.unfinished == 1
        pool.submit("late", Problem("pc", "q", "a"), "2", group="c", group_size=2)
        assert {key: result.parts["rank"] for key, result in drain(pool)} == {"early": 0.0, "late": 1.0}
        alone = pool.score([(Problem("p", "q", "a"), "3"), (Problem("p", "q", "a"), "4")])
        assert [result.parts["size"] for result in alone] == [1.0, 1.0]
        both = pool.score([(Problem("p", "q", "a"), "3"), (Problem("p", "q", "a"), "4")], ["one", "one"])
        assert [result.parts for result in both] == [{"rank": 0.0, "size": 2.0}, {"rank": 1.0, "size": 2.0}]


def test_a_closed_pool_takes_nothing(pool: RewardPool) -> None:
    pool.close()
    for act in (lambda: pool.submit(1, Problem("p", "q", "a"), "1"), pool.poll):
        with pytest.raises(RuntimeError, match="pool is closed"):
            act()
