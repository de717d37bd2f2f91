"""Servers and environments in one thread, for tests of episodes: turns follow from their seeds, and finish in an order of their
own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import Any

from tepo_megatron.config.reward import EnvironmentConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Response, WeightsVersion, token_ids
from tepo_megatron.sampler.protocol import KeyedResponse
from tepo_megatron.tasks.environments.agent_session import ChatRequest
from tepo_megatron.tasks.environments.episodes import Episode, EpisodeStream, Observations
from tepo_megatron.tasks.environments.protocol import EpisodeAnswer, StepResult

END, VOCABULARY, TURN = 2, 50, 6
"""The end token, the model's tokens, and the longest turn."""


def turn_of(seed: int, room: int, version: WeightsVersion) -> Response:
    """What the servers write with a seed: up to ``TURN`` tokens, the last of them the end token unless it was cut."""
    draws = random.Random(seed)
    ids = [draws.randrange(3, VOCABULARY) for _ in range(draws.randrange(TURN))]
    if len(ids) < min(room, TURN):
        ids.append(END)
    ids = ids[:room]
    logprobs = [-draws.random() for _ in ids]
    return Response(ids, logprobs, "stop" if ids[-1] == END else "length", version)


@dataclass
class FakeSamples:
    """A ``SampleStream``. ``asked``: (number, prompt, seed, room) of every turn. Weights change every few turns."""

    order: random.Random
    asked: list[tuple[Hashable, tuple[int, ...], int, int]] = field(default_factory=list)
    left: list[Hashable] = field(default_factory=list)
    _pending: list[KeyedResponse] = field(default_factory=list)

    @property
    def weights_version(self) -> WeightsVersion:
        return WeightsVersion(len(self.asked) // 5)

    @property
    def unfinished(self) -> int:
        return len(self._pending)

    def __enter__(self) -> FakeSamples:
        return self

    def __exit__(self, *_: object) -> None:
        self._pending.clear()

    def submit(self, key: Hashable, prompt_ids: Any, seed: int, *, room: int, home: Hashable) -> None:
        assert key == home
        assert room >= 1
        self.asked.append((key, tuple(token_ids(prompt_ids).tolist()), seed, room))
        self._pending.append((key, 0, turn_of(seed, room, self.weights_version)))

    def leave(self, home: Hashable) -> None:
        self.left.append(home)

    def next(self, timeout_s: float | None) -> KeyedResponse | None:
        return self._pending.pop(self.order.randrange(len(self._pending))) if self._pending else None


@dataclass
class FakeHost:
    """Environments as objects of this process; each of ``lost`` loses the call of that number, and its episode."""

    make: Callable[[], Any]
    order: random.Random
    lost: set[int] = field(default_factory=set)
    notice: str | None = None
    _episodes: dict[int, Any] = field(default_factory=dict)
    _found: list[EpisodeAnswer] = field(default_factory=list)
    _calls: int = 0

    @property
    def busy(self) -> bool:
        return bool(self._found)

    def call(self, episode: int, call: list[Any]) -> None:
        self._calls += 1
        if self._calls in self.lost:
            self._episodes.pop(episode, None)
            self._found.append(EpisodeAnswer(episode, lost="it was lost", suspect=True))
            return
        if call[0] == "reset":
            environment = self._episodes[episode] = self.make()
            result = StepResult(environment.reset(Problem.from_json(*call[1]), seed=call[2]))
        else:
            result = self._episodes[episode].step(ResponseText.from_json(*call[1:]))
        told: Any = result.observation
        kind = "text" if isinstance(told, str) else "ids"
        if isinstance(told, ChatRequest):
            kind, told = "chat", vars(told)
        answer = {"reward": result.reward, "done": result.done, "tool_error": result.tool_error}
        self._found.append(EpisodeAnswer(episode, {**answer, "observation": None if not told else [kind, told]}))

    def end(self, episode: int) -> None:
        self._episodes.pop(episode, None)
        self._found = [each for each in self._found if each.episode != episode]

    def poll(self, timeout_s: float) -> Sequence[EpisodeAnswer]:
        self.order.shuffle(self._found)
        count = self.order.randint(1 if timeout_s else 0, len(self._found)) if self._found else 0
        found, self._found = self._found[:count], self._found[count:]
        return found

    def close(self) -> None: ...


class Letters:
    """A tokenizer of digits and small letters that puts a token before a prompt."""

    eos_ids, unk_id = (END,), 0
    known = {each: 3 + at for at, each in enumerate("0123")} | {each: 10 + at for at, each in enumerate(ascii_lowercase)}

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        return [self.known.get(each, 0) for each in text]

    def prompt_ids(self, text: str, *, special_tokens: bool = False) -> list[int]:
        return [1, *self.encode(text)]

    def decode(self, ids: Any) -> str:
        return "".join(chr(97 + token % 26) for token in ids)


@dataclass
class Played:
    """A stream of environments that are objects of this process, and how its episodes ended."""

    make: Callable[[], Any]
    order: random.Random
    observations: Observations
    problem_of: Callable[[Any], Problem] = lambda number: Problem(f"p{number}", "", "")
    limits: Mapping[str, Any] = field(default_factory=dict)
    max_length: int = 100
    host: type[FakeHost] = FakeHost
    lost: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.samples = FakeSamples(self.order)
        self.ended: list[tuple[Episode, Response]] = []
        self.stream = EpisodeStream(
            self.samples,  # type: ignore[arg-type]
            self.host(self.make, self.order, self.lost),
            self.problem_of,
            self.observations,
            EnvironmentConfig.model_validate({"name": "a.py:A", **self.limits}),
            self.max_length,
            lambda episode, response: self.ended.append((episode, response)),
        )


def play(stream: EpisodeStream) -> dict[tuple[Any, int], Response]:
    found: dict[tuple[Any, int], Response] = {}
    while stream.unfinished:
        if (result := stream.next(1.0)) is not None:
            key, index, response = result
            assert (key, index) not in found
            found[key, index] = response
    return found
