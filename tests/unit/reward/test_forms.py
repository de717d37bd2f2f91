"""What a verifier may be: a function in a file, a class, one of groups, async, one for each source; and what it may return."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tepo_megatron.config.data import DataConfig
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem, ResponseText, reward_fault
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.pool import RewardPool, weigh
from tepo_megatron.tasks.reward.verifier_task import VerifierTask

FORMS = '''
import asyncio, os
import beside

def sees(problem, response):
    """What is known of a response and its problem."""
    assert response.token_ids == (5, 70000, 2), response.token_ids
    assert problem.metadata == {"level": 3, "tags": ["a"], "unit": None}, problem.metadata
    return {"cut": response.finish_reason == "length", "length": len(response), "beside": beside.VALUE}

class Counted:
    """Made once a worker; its constructor is the set-up."""

    def __init__(self, start: int, fail: bool = False):
        if fail:
            raise OSError("no model here")
        self.calls = start
        with open(os.environ["TRIES"], "a") as file:
            file.write("made\\n")

    def score(self, problem, response):
        self.calls += 1
        return self.calls

class Neither:
    pass

async def many(problem, response):
    """Returns how many are under way at once at most, since so many are waited for."""
    state = many.__dict__
    state["now"] = state.get("now", 0) + 1
    state["most"] = max(state.get("most", 0), state["now"])
    if response.startswith("together"):
        while state["most"] < 4:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    state["now"] -= 1
    return state["most"]

def says(problem, response):
    return eval(response, {"nan": float("nan")})

class Groups:
    def score_group(self, problem, responses):
        return says(problem, responses[0])
'''
RIGHT, OTHER, NUMBER = "{'format': 0.5, 'correct': 1}", "{'correct': 1, 'style': 2}", "1.0"
"""Responses that ``says`` returns."""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file that is called as a module of the standard library is, with a module beside it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "math.py").write_text(FORMS)
    (folder / "beside.py").write_text("VALUE = 4\n")
    (tmp_path / "tries").touch()
    monkeypatch.setenv("TRIES", str(tmp_path / "tries"))
    return f"{folder}/math.py"


def pool_of(verifier: str, **options: object) -> RewardPool:
    return RewardPool(RewardConfig.model_validate({"verifier": verifier, **options}))


def items(*responses: str) -> list[tuple[Problem, str]]:
    return [(Problem(f"p{number}", "q", "a"), response) for number, response in enumerate(responses)]


def test_a_verifier_sees_the_line_the_ids_and_how_it_ended(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("p", "q", "a", {"level": 3, "tags": ["a"], "unit": None})
    monkeypatch.chdir(Path(file).parents[1])
    with pool_of("mine/math.py:sees") as pool:  # a path is relative to where the run is started
        (result,) = pool.score([(problem, ResponseText("x y", (5, 70000, 2), "length"))])
        assert result.error is None, result.error
        assert result.parts == {"cut": 1.0, "length": 3.0, "beside": 4.0}
        assert result.reward == 8.0
        assert result.seconds > 0


def test_a_class_is_made_once_a_worker(file: str) -> None:
    with pool_of(f"{file}:Counted", kwargs={"start": 10}, workers=2) as pool:
        rewards = [result.reward for result in pool.score(items(*map(str, range(20))))]
        assert all(reward is not None and 10 < reward <= 30 for reward in rewards)
        assert max(reward for reward in rewards if reward is not None) >= 20
    assert (Path(file).parents[1] / "tries").read_text() == "made\n" * 2


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("Counted", {"start": 1, "fail": True}, r"raised OSError: no model here, at .*math\.py:\d+: \"raise OSError"),
        ("Counted", {"key": "secret"}, r"the verifier '.*' cannot be made with kwargs key: it raised TypeError: .* 'key'"),
        ("Counted", {}, r"with no kwargs: it raised TypeError: .*'start'"),
        ("Neither", {}, "neither a method score nor score_group"),
        ("sees", {"start": 1}, r"sees' is no class, and takes no kwargs \(start\)"),
        ("nothing", {}, "has no function nothing"),
    ],
)
def test_what_cannot_be_made_is_refused(file: str, name: str, kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        pool_of(f"{file}:{name}", kwargs=kwargs)
    assert "secret" not in str(caught.value)


def test_async_calls_are_under_way_together_within_a_bound(file: str) -> None:
    with pool_of(f"{file}:many", concurrency=4) as pool:
        results = pool.score(items(*[f"together {number}" for number in range(12)]))
        assert [(result.reward, result.error) for result in results] == [(4.0, None)] * 12


def test_a_group_fails_whole_or_in_part(file: str) -> None:
    with pool_of(f"{file}:Groups") as pool:
        same = ["g"] * 3
        whole = pool.score(items("[1.0]", "b", "c"), same)
        assert {result.reward for result in whole} == {None}
        assert "score_group returned 1 rewards for a group of 3 responses, at " in str(whole[0].error)
        assert "score_group returned dict, not a list" in str(pool.score(items(RIGHT, "b", "c"), same)[2].error)
        part = pool.score(items("[1.0, None, nan]", "b", "c"), same)
        assert (part[0].reward, part[0].error) == (1.0, None)
        assert "returned NoneType, not a number, at " in str(part[1].error)
        assert "returned nan, not a finite number, at " in str(part[2].error)


def test_components_are_weighed_and_others_fail(file: str) -> None:
    with pool_of(f"{file}:says", weights={"correct": 2.0, "format": -1.0}) as pool:
        right, other, number, nan, empty = pool.score(items(RIGHT, OTHER, NUMBER, "{'format': nan, 'correct': 0}", "{}"))
        assert right == RewardResult(1.5, parts={"correct": 1.0, "format": 0.5})
        assert list(right.parts) == ["correct", "format"]  # in the order of reward.weights
        named = "not the components correct, format of reward.weights"
        assert f"returned the components correct, style, {named}" in str(other.error)
        assert f"returned a number, {named}" in str(number.error)
        assert "returned for its component 'format' nan, not a finite number" in str(nan.error)
        assert "returned no component" in str(empty.error)


def test_without_weights_components_are_those_of_the_rehearsal(file: str) -> None:
    with pool_of(f"{file}:says") as pool:
        pool.rehearse([Problem("p", "q", RIGHT)])
        assert pool.components == ("format", "correct")
        right, number = pool.score(items(RIGHT, NUMBER))
        assert (right.reward, list(right.parts)) == (1.5, ["format", "correct"])
        assert "returned a number, not the components" in str(number.error)
        beside = pool.another()
    with beside:
        right, other = beside.score(items(RIGHT, OTHER))
        assert list(right.parts) == ["format", "correct"]
        assert "not the components format, correct that it returned before" in str(other.error)
    with pool_of(f"{file}:says") as pool, pytest.raises(ValueError, match="component cannot be called mean"):
        pool.rehearse([Problem("p", "q", "{'mean': 1}")])


names = st.sampled_from(["a", "b", "c", "d"])
numbers = st.floats(-1e3, 1e3)


@given(parts=st.dictionaries(names, numbers, min_size=1), weights=st.dictionaries(names, numbers, min_size=1))
def test_a_reward_is_the_weighted_sum_of_exactly_the_weighted_components(
    parts: dict[str, float], weights: dict[str, float]
) -> None:
    assert weigh(parts, None, None)[0] == pytest.approx(sum(parts.values()))
    if set(parts) != set(weights):
        with pytest.raises(ValueError, match="returned the components"):
            weigh(parts, weights, None)
        return
    reward, ordered = weigh(parts, weights, None)
    assert reward == pytest.approx(sum(weights[name] * parts[name] for name in parts))
    assert list(ordered.items()) == [(name, parts[name]) for name in weights]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        *(({name: 1.0}, f"component cannot be called {name}") for name in ("mean", "std", "failed", "overlong")),
        *(({name: 1.0}, "cannot name a component") for name in ("a b", "", "1a", "x" * 61)),
        ({}, "names no component"),
    ],
)
def test_weights_of_no_component_or_of_one_with_the_metric_of_another_are_refused(
    weights: dict[str, float], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardConfig(weights=weights)


any_numbers = st.floats() | st.sampled_from([1e308, -1e308, 1e39, 3.5e38, 1e16, -1e15, math.inf, math.nan])
components = st.dictionaries(st.sampled_from("abc"), any_numbers, min_size=1)


@given(value=any_numbers | components, weights=st.none() | components)
def test_a_weighted_sum_is_a_reward_or_a_sentence(value: Any, weights: Any) -> None:
    try:
        reward, parts = weigh(value, weights, None)
    except ValueError:
        return
    assert not any(map(reward_fault, (reward, *parts.values())))


MINE = """
def tell(problem, response):
    return {"source": float(problem.source == "own"), "messages": float(problem.messages == (("user", "q"),))}

def score_group(problem, responses):
    return [float(len(responses)) for _ in responses]
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerifierTask]:
    path = tmp_path_factory.mktemp("verifiers") / "mine.py"
    path.write_text(MINE)
    sources = [
        {"path": "a.jsonl", "name": "usual"},
        {"path": "b.jsonl", "name": "own", "verifier": f"{path}:tell", "verifier_weights": {"source": 2.0, "messages": 0.5}},
        {"path": "c.jsonl", "name": "groups", "verifier": f"{path}:score_group"},
    ]
    data = DataConfig.model_validate({"train": sources, "heldout": [{"path": "d.jsonl", "name": "own"}]})
    with VerifierTask(RewardConfig(verifier="exact"), data) as opened:
        yield opened


def problem(source: str) -> Problem:
    return Problem(source, "q", "a", {}, (("user", "q"),), source)


def test_each_verifier_scores_its_own(pool: VerifierTask) -> None:
    usual, own, groups, unknown = map(problem, ("usual", "own", "groups", ""))
    items = [(usual, "a"), (own, "x"), (groups, "x"), (usual, "b"), (groups, "y"), (unknown, "a")]
    results = pool.score(items, [0, 1, 2, 0, 2, 3])
    assert [result.reward for result in results] == [1.0, 2.5, 2.0, 0.0, 2.0, 1.0]
    assert results[1].parts == {"source": 1.0, "messages": 1.0}
    pool.rehearse([usual, own, groups])
    assert (pool.scores_groups, pool.unfinished) == (True, 0)


def test_answers_come_one_by_one_and_a_reset_forgets_the_rest(pool: VerifierTask) -> None:
    pool.reset()
    assert pool.poll(None) == []  # nothing is under way
    pool.submit("half", problem("groups"), "x", group=0, group_size=2)
    pool.submit("one", problem("own"), "x")
    assert [(key, result.reward) for key, result in pool.poll(None)] == [("one", 2.5)]
    assert pool.poll(None) == []  # the group waits for its other response, and nothing works
    assert pool.unfinished == 1
    pool.reset()
    assert pool.unfinished == 0
