"""Episodes: the model reads exactly what was written, nothing is encoded again, and each ends once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tepo_megatron.core.problem import Problem, ResponseText, is_reward
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.sampler.sampling import prompt_seed
from tepo_megatron.tasks.environments.episodes import Observations
from tepo_megatron.tasks.environments.protocol import StepResult
from tepo_megatron.tasks.reward.pool import weigh
from tests.support.episodes import VOCABULARY, Letters, Played, play, turn_of

PROMPT = (1, 7, 8)


def encode(text: str) -> list[int]:
    return [3 + ord(letter) - ord("a") for letter in text]


def show(ids: Any) -> str:
    return ",".join(map(str, ids))


class Alphabet(Letters):
    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        return encode(text)

    def decode(self, ids: Any) -> str:
        return show(ids)


OBSERVATIONS = Observations(Alphabet(), VOCABULARY)  # type: ignore[arg-type]

said = st.none() | st.text("abcdef", max_size=4) | st.lists(st.integers(0, VOCABULARY - 1), max_size=4)
"""What an environment says in a turn."""

scripts = st.lists(st.tuples(said, st.integers(-2, 2), st.booleans()), min_size=1, max_size=5)
"""The answers to a model's turns, their rewards, and whether it made a mistake; it is done with the last."""


class Scripted:
    """Says what its problem's metadata has, and notes what it was told."""

    def __init__(self, told: dict[str, list[list[Any]]]) -> None:
        self.told = told

    def reset(self, problem: Problem, seed: int) -> Any:
        self.script = list(problem.metadata["script"])
        self.heard: list[Any] = [seed]
        self.told.setdefault(problem.id, []).append(self.heard)
        return problem.metadata["first"]

    def step(self, action: ResponseText) -> StepResult:
        self.heard.append((str(action), action.token_ids, action.finish_reason))
        observation, reward, mistake = self.script.pop(0)
        return StepResult(observation, float(reward), not self.script, mistake)


def as_ids(observation: Any) -> list[int]:
    return encode(observation) if isinstance(observation, str) else list(observation or [])


@given(st.data())
def test_an_episode_is_what_both_sides_wrote(data: st.DataObject) -> None:
    """Against the same game played turn by turn without any driver."""
    n, order = data.draw(st.integers(1, 3)), random.Random(data.draw(st.integers(0, 99)))
    problems = [
        Problem(f"p{at}", "", "", {"script": data.draw(scripts), "first": data.draw(said)})
        for at in range(data.draw(st.integers(1, 3)))
    ]
    limits = {"max_turns": data.draw(st.integers(1, 5)), "max_tokens": data.draw(st.none() | st.integers(2, 30))}
    told: dict[str, list[list[Any]]] = {}
    played = Played(lambda: Scripted(told), order, OBSERVATIONS, lambda at: problems[at], limits, max_length=40)
    samples = played.samples
    with played.stream as stream:
        for at in range(len(problems)):
            stream.submit(at, PROMPT, 100 * at, n)
        found = play(stream)
    assert sorted(found) == [(at, index) for at in range(len(problems)) for index in range(n)]
    asked = {prompt: (seed, room) for _, prompt, seed, room in samples.asked}
    for (at, index), response in found.items():
        (end,) = [episode for episode, of in played.ended if of is response]
        ids, mask, reason, reward = alone(problems[at], 100 * at + index, limits, asked)
        assert response.response_ids.tolist() == ids
        assert (response.loss_mask.tolist() if response.loss_mask is not None else [True] * len(ids)) == mask
        assert response.logprobs[[not own for own in mask]].tolist() == [0.0] * mask.count(False)
        assert (response.logprobs[mask] < 0).all()
        if not any(mask):
            assert end.error is not None
            assert "leave no room for a turn" in end.error
            continue
        assert (end.error, end.reward, response.finish_reason) == (None, reward, reason)
    for problem in problems:
        for seed, *turns in told[problem.id]:
            assert seed == 100 * int(problem.id[1:])  # the group's, so that its episodes begin alike
            assert all(text == show(token_ids) for text, token_ids, _ in turns)
    assert len(samples.left) == len(found)


def alone(problem: Problem, seed: int, limits: dict[str, Any], asked: Any) -> tuple[list[int], list[bool], str, float]:
    """Tokens, whose they are, why it ended, and its reward. ``asked``: what the servers read → (seed, room)."""

    def room_after(count: int) -> int:
        return min(40 - len(PROMPT), limits["max_tokens"] or 40) - count

    ids = as_ids(problem.metadata["first"])
    mask = [False] * len(ids)
    reward, turns = 0.0, 0
    if room_after(len(ids)) < 1:
        return [], [], "stop", 0.0
    for at, (observation, turn_reward, _) in enumerate(problem.metadata["script"], start=1):
        room = room_after(len(ids))
        turn = turn_of(prompt_seed(seed, len(ids)) if ids else seed, room, WeightsVersion(0))
        assert room == asked[*PROMPT, *ids][1]
        ids = [*ids, *turn.response_ids.tolist()]
        mask = [*mask, *[True] * turn.response_ids.size]
        reward, turns = reward + turn_reward, turns + 1
        if at == len(problem.metadata["script"]):
            return ids, mask, turn.finish_reason, reward
        more = as_ids(observation)
        if turns == limits["max_turns"] or room_after(len(ids) + len(more)) < 1:
            return ids, mask, "length", reward
        ids, mask = [*ids, *more], [*mask, *[False] * len(more)]
    raise AssertionError("it is done with its last answer")


class Once:
    """Done after two turns."""

    turns = 0

    def reset(self, problem: Problem, seed: int) -> str:
        return "a"

    def step(self, action: ResponseText) -> StepResult:
        self.turns += 1
        return StepResult("b", 0.5, self.turns == 2)


@pytest.mark.parametrize(
    ("lost", "restarts", "ends"), [({1}, 1, True), ({2}, 1, True), ({3}, 1, True), ({2, 4}, 1, False), ({1}, 0, False)]
)
def test_a_lost_episode_is_begun_again_as_often_as_is_allowed(lost: set[int], restarts: int, ends: bool) -> None:
    """Call 1 is its reset; 2 and 3 its steps. It then writes the same again, with the same seeds."""
    played = Played(Once, random.Random(0), OBSERVATIONS, limits={"max_restarts": restarts}, lost=lost)
    samples = played.samples
    with played.stream as stream:
        stream.submit(0, PROMPT, 5, 1)
        found = play(stream)
    ((end, response),) = played.ended
    assert found[0, 0] is response
    assert (end.error is None) == ends
    if ends:
        assert (end.reward, end.turns, end.restarts) == (1.0, 2, 1)
        seeds = [seed for _, prompt, seed, _ in samples.asked if len(prompt) == len(PROMPT) + 1]
        assert len(set(seeds)) == 1
    else:
        assert "it was lost" in str(end.error)


class Pays:
    """A reward for each turn: those of its problem's metadata."""

    def reset(self, problem: Problem, seed: int) -> None:
        self.rewards = list(problem.metadata["rewards"])

    def step(self, action: ResponseText) -> StepResult:
        return StepResult("b", self.rewards.pop(0), not self.rewards)


numbers = st.floats() | st.sampled_from([1e308, -1e308, 1e39, 1e16, -1e15, 0.0])
components = st.dictionaries(st.sampled_from("abc"), numbers, min_size=1)


@example([0.0, 0.5, 1.0])
@example([0.0, {"a": 1.0}, {"a": 2.0, "b": 1.0}, 0.0])
@example([0.0, {"a": 0.0}])
@example([{"a": 1.0}, 1.0])
@given(st.lists(numbers, min_size=1, max_size=5) | st.lists(numbers | components, min_size=1, max_size=5))
def test_rewards_of_turns_are_added_numbers_or_components(turns: list[Any]) -> None:
    """0 adds to both. The sum is a reward or refused with a sentence, as it is for a verifier."""
    problem = Problem("p", "", "", {"rewards": turns})
    played = Played(Pays, random.Random(0), OBSERVATIONS, lambda _: problem, {"max_turns": 9}, max_length=500)
    with played.stream as stream:
        stream.submit(0, PROMPT, 5, 1)
        play(stream)
    ((end, _),) = played.ended
    paid = [reward for reward in turns if reward != 0.0]
    if len({type(reward) for reward in paid}) == 2:
        assert "a number as the reward of one turn, and components as that of another" in str(end.error)
        return
    names = {name for reward in paid if isinstance(reward, dict) for name in reward}
    expected: Any = {name: sum(reward.get(name, 0.0) for reward in paid) for name in names} if names else sum(paid)
    assert end.reward == expected or repr(end.reward) == repr(expected) or "nan" in repr(expected)
    try:
        reward, parts = weigh(end.reward, None, None)
    except ValueError:
        return
    assert all(map(is_reward, (reward, *parts.values())))
