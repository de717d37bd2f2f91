"""Episodes: the model reads exactly what was written, nothing is encoded again, and each ends once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.sampler.sampling import prompt_seed
from tepo_megatron.tasks.environments.episodes import EpisodeLimits, EpisodeStream, Observations, add_rewards
from tepo_megatron.tasks.environments.protocol import StepResult
from tests.support.episodes import END, VOCABULARY, Ends, FakeHost, FakeSamples, play, turn_of

PROMPT = (1, 7, 8)


def encode(text: str) -> list[int]:
    return [3 + ord(letter) - ord("a") for letter in text]


OBSERVATIONS = Observations(encode, lambda messages, ended: [], unknown=None, vocab_size=VOCABULARY)

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


def show(ids: Any) -> str:
    return ",".join(map(str, ids))


@given(st.data())
def test_an_episode_is_what_both_sides_wrote(data: st.DataObject) -> None:
    """Against the same game played turn by turn without any driver."""
    n, order = data.draw(st.integers(1, 3)), random.Random(data.draw(st.integers(0, 99)))
    problems = [
        Problem(f"p{at}", "", "", {"script": data.draw(scripts), "first": data.draw(said)})
        for at in range(data.draw(st.integers(1, 3)))
    ]
    limits = EpisodeLimits(data.draw(st.integers(1, 5)), data.draw(st.none() | st.integers(2, 30)), max_length=40)
    told: dict[str, list[list[Any]]] = {}
    samples, ends = FakeSamples(order), Ends()
    host = FakeHost(lambda: Scripted(told), order)
    stream = EpisodeStream(samples, host, lambda at: problems[at], OBSERVATIONS, show, limits, frozenset([END]), ends)  # type: ignore[arg-type]
    with stream:
        for at in range(len(problems)):
            stream.submit(at, PROMPT, 100 * at, n)
        found = play(stream)
    assert sorted(found) == [(at, index) for at in range(len(problems)) for index in range(n)]
    asked = {prompt: (seed, room) for _, prompt, seed, room in samples.asked}
    for (at, index), response in found.items():
        ((_, _, end),) = [each for each in ends.found if each[1] is response]
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


def alone(problem: Problem, seed: int, limits: EpisodeLimits, asked: Any) -> tuple[list[int], list[bool], str, float]:
    """Tokens, whose they are, why it ended, and its reward. ``asked``: what the servers read → (seed, room)."""
    ids = as_ids(problem.metadata["first"])
    mask = [False] * len(ids)
    reward, turns = 0.0, 0
    if limits.room(len(PROMPT), len(ids)) < 1:
        return [], [], "stop", 0.0
    for at, (observation, turn_reward, _) in enumerate(problem.metadata["script"], start=1):
        room = limits.room(len(PROMPT), len(ids))
        turn = turn_of(prompt_seed(seed, len(ids)) if ids else seed, room, WeightsVersion(0))
        assert room == asked[*PROMPT, *ids][1]
        ids = [*ids, *turn.response_ids.tolist()]
        mask = [*mask, *[True] * turn.response_ids.size]
        reward, turns = reward + turn_reward, turns + 1
        if at == len(problem.metadata["script"]):
            return ids, mask, turn.finish_reason, reward
        more = as_ids(observation)
        if turns == limits.max_turns or limits.room(len(PROMPT), len(ids) + len(more)) < 1:
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
    order = random.Random(0)
    samples, noted = FakeSamples(order), Ends()
    limits = EpisodeLimits(4, None, 60, max_restarts=restarts)
    host = FakeHost(Once, order, lost)
    stream = EpisodeStream(samples, host, lambda at: Problem("p", "", ""), OBSERVATIONS, show, limits, frozenset([END]), noted)  # type: ignore[arg-type]
    with stream:
        stream.submit(0, PROMPT, 5, 1)
        found = play(stream)
    ((_, response, end),) = noted.found
    assert found[0, 0] is response
    assert (end.error is None) == ends
    if ends:
        assert (end.reward, end.turns, end.restarts) == (1.0, 2, 1)
        seeds = [seed for _, prompt, seed, _ in samples.asked if len(prompt) == len(PROMPT) + 1]
        assert len(set(seeds)) == 1
    else:
        assert "it was lost" in str(end.error)


def test_rewards_of_turns_are_added_numbers_or_components() -> None:
    assert add_rewards(add_rewards(0.0, 0.5), 1.0) == 1.5
    assert add_rewards(add_rewards(0.0, {"a": 1.0}), {"a": 2.0, "b": 1.0}) == {"a": 3.0, "b": 1.0}
    assert add_rewards({"a": 1.0}, 0.0) == {"a": 1.0}
    assert add_rewards(0.0, {"a": 0.0}) == {"a": 0.0}
    with pytest.raises(ValueError, match="a number as the reward of one turn, and components as that of another"):
        add_rewards({"a": 1.0}, 1.0)
