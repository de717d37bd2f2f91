"""Drives episodes: servers sample turns, and environments answer them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Response, TokenIds, token_ids
from tepo_megatron.sampler.protocol import KeyedResponse, SampleStream
from tepo_megatron.sampler.sampling import append_observation, join_parts, prompt_seed
from tepo_megatron.tasks.environments.episode_tokens import Observations
from tepo_megatron.tasks.environments.host import EnvironmentHost, EpisodeAnswer, reset_call, step_call

_POLL_INTERVAL_S = 1.0

_MAX_RESTARTS = 20

_FAST_POLL_S = 0.005
"""Applies while the other side may have something first."""

Reward = float | dict[str, float]


@dataclass(frozen=True)
class EpisodeLimits:
    """``max_tokens`` after the prompt (None: no limit); ``max_length`` of prompt and all turns."""

    max_turns: int
    max_tokens: int | None
    max_length: int
    max_restarts: int = 1

    def room(self, prompt: int, behind: int) -> int:
        most = self.max_length - prompt
        return min(most, self.max_tokens if self.max_tokens is not None else most) - behind


@dataclass(frozen=True)
class EpisodeEnd:
    """``reward``: sum over turns; ``seconds``: of the environment; ``new_histories``: how often an agent began its
    conversation again.
    """

    turns: int
    reward: Reward
    tool_errors: int
    restarts: int
    seconds: float
    error: str | None = None
    new_histories: int = 0


class _EpisodeSink(Protocol):
    def note(self, problem: Problem, response: Response, end: EpisodeEnd) -> None: ...


@dataclass(eq=False)
class _Episode:
    key: Hashable
    index: int
    problem: Problem
    prompt: TokenIds
    seed: int
    """The group's; the sample's seed is ``seed`` + ``index``."""
    restarts: int = 0
    suspected: int = 0
    """How often a worker ended during a call of this episode."""
    drawn: Response | None = None
    """Tokens up to the model's last one."""
    context: Response | None = None
    turns: int = 0
    reward: Reward = 0.0
    tool_errors: int = 0
    new_histories: int = 0
    most: int | None = None
    """In tokens; an agent sets it."""
    seconds: float = 0.0


@dataclass
class EpisodeStream:
    """Entering enters ``inner``; exiting ends all episodes.

    The finish reason is that of the last turn if the environment ended the episode, and ``length`` at a limit. A failed
    episode is returned with the tokens so far; ``sink`` receives the cause. ``numbers``: never shared by two streams, since
    answers to ended episodes may still arrive.
    """

    inner: SampleStream
    host: EnvironmentHost
    problem_of: Callable[[Any], Problem]
    observations: Observations
    decode: Callable[[Sequence[int]], str]
    limits: EpisodeLimits
    end_ids: frozenset[int]
    sink: _EpisodeSink
    numbers: Iterator[int] = field(default_factory=count)
    _open: dict[int, _Episode] = field(default_factory=dict)
    _ready: deque[KeyedResponse] = field(default_factory=deque)

    def __enter__(self) -> EpisodeStream:
        self.inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for number in list(self._open):
            self._drop(number)
        self.inner.__exit__(kind, value, trace)

    @property
    def unfinished(self) -> int:
        return len(self._open) + len(self._ready)

    def submit(
        self,
        key: Hashable,
        prompt_ids: ArrayLike,
        seed: int,
        n: int = 1,
        *,
        continued: Mapping[int, Response] | None = None,
        only: Sequence[int] | None = None,
    ) -> None:
        """As ``SampleStream.submit``; episodes cannot be continued, since the environment's state is lost."""
        assert not continued, "episodes cannot be continued; the configuration refuses rollout.partial"
        for index in range(n) if only is None else only:
            self._begin(_Episode(key, index, self.problem_of(key), token_ids(prompt_ids), seed))

    def next(self, timeout_s: float | None) -> KeyedResponse | None:
        """None if no episode ends within ``timeout_s`` (None: no limit), or none is open. Raises as ``SampleStream.next``, and
        RuntimeError if environments cannot run any longer.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ready and self._open:
            left = _POLL_INTERVAL_S if deadline is None else min(_POLL_INTERVAL_S, max(0.0, deadline - time.monotonic()))
            owed = self.host.busy
            for answer in self.host.poll(0.0 if self.inner.unfinished else left):
                self._take_answer(answer)
            if self.inner.unfinished and not self._ready:
                drawn = self.inner.next(min(left, _FAST_POLL_S) if owed else left)
                if drawn is not None:
                    self._take_turn(*drawn)
            if deadline is not None and time.monotonic() >= deadline:
                break
        return self._ready.popleft() if self._ready else None

    def abort(self) -> list[KeyedResponse]:
        for number in list(self._open):
            self._drop(number)
        ready = list(self._ready)
        self._ready.clear()
        return ready

    # -- private -----------------------------------------------------------------------------------------------------------

    def _begin(self, episode: _Episode) -> None:
        number = next(self.numbers)
        self._open[number] = episode
        self.host.call(number, reset_call(episode.problem, episode.seed, alone=episode.suspected > 0))

    def _ask(self, number: int, episode: _Episode) -> None:
        behind = token_ids(()) if episode.context is None else episode.context.response_ids
        seed = episode.seed + episode.index
        if behind.size:
            seed = prompt_seed(seed, behind.size)
        room = self.limits.room(episode.prompt.size, behind.size)
        room = room if episode.most is None else min(room, episode.most)
        self.inner.submit(number, np.concatenate([episode.prompt, behind]), seed, room=room, home=number)

    def _take_turn(self, number: Hashable, _: int, turn: Response) -> None:
        assert isinstance(number, int)
        episode = self._open.get(number)
        if episode is None:
            return  # its worker was lost, and the episode began again
        episode.drawn = turn if episode.context is None else join_parts(episode.context, turn)
        episode.turns += 1
        action = ResponseText(self.decode(turn.response_ids.tolist()), turn.response_ids, turn.finish_reason)
        action.prompt_tokens = episode.prompt.size + episode.drawn.response_ids.size - turn.response_ids.size
        self.host.call(number, step_call(action))

    def _take_answer(self, found: EpisodeAnswer) -> None:
        episode = self._open.get(found.episode)
        if episode is None:
            return
        episode.seconds += found.seconds
        if found.lost is not None:
            self._restart(found, episode)
            return
        try:
            if found.error is not None:
                raise ValueError(found.error)
            done = self._note(episode, found.answer)
            turn = episode.drawn
            if done and turn is not None:
                self._finish(found.episode, turn.finish_reason)
            elif episode.turns >= self.limits.max_turns:
                self._finish(found.episode, "length")
            else:
                self._go_on(found.episode, episode, found.answer["observation"])
        except ValueError as error:
            self._finish(found.episode, "stop", str(error))

    def _note(self, episode: _Episode, answer: Mapping[str, Any]) -> bool:
        episode.tool_errors += answer["tool_error"]
        episode.reward = add_rewards(episode.reward, answer["reward"])
        return bool(answer["done"])

    def _go_on(self, number: int, episode: _Episode, observation: Sequence[Any] | None) -> None:
        if observation is not None and observation[0] == "chat":
            self._read_request(episode, observation[1])
        drawn = episode.drawn
        ended = None if drawn is None else int(drawn.response_ids[-1]) in self.end_ids
        ids = self.observations.ids(observation, ended=ended, opening=episode.prompt)
        behind = (0 if drawn is None else drawn.response_ids.size) + ids.size
        if self.limits.room(episode.prompt.size, behind) < 1:
            if drawn is None:
                raise ValueError(
                    f"the prompt's {episode.prompt.size} tokens and the {ids.size} that the environment begins with leave no "
                    "room for a turn; raise environment.max_tokens, or shorten them"
                )
            self._finish(number, "length")
            return
        episode.context = append_observation(drawn, ids) if ids.size else drawn
        self._ask(number, episode)

    def _read_request(self, episode: _Episode, request: Mapping[str, Any]) -> None:
        episode.most = request["max_tokens"]
        if request["begins"] and episode.drawn is not None:
            episode.drawn = episode.context = None
            episode.new_histories += 1

    def _restart(self, found: EpisodeAnswer, episode: _Episode) -> None:
        suspected = episode.suspected + found.suspect
        if suspected > self.limits.max_restarts or episode.restarts >= _MAX_RESTARTS:
            times = f" {suspected} times" if suspected > 1 else ""
            self._finish(found.episode, "stop", f"its worker ended{times} under it, the last time since {found.lost}")
            return
        self._drop(found.episode)
        again = _Episode(episode.key, episode.index, episode.problem, episode.prompt, episode.seed)
        again.restarts, again.suspected = episode.restarts + 1, suspected
        self._begin(again)

    def _finish(self, number: int, reason: str, error: str | None = None) -> None:
        episode = self._open[number]
        self._drop(number)
        response = self._nothing() if episode.drawn is None else replace(episode.drawn, finish_reason=reason)
        end = EpisodeEnd(
            episode.turns,
            episode.reward,
            episode.tool_errors,
            episode.restarts,
            episode.seconds,
            error,
            episode.new_histories,
        )
        self.sink.note(episode.problem, response, end)
        self._ready.append((episode.key, episode.index, response))

    def _nothing(self) -> Response:
        return Response((), (), "stop", self.inner.weights_version)

    def _drop(self, number: int) -> None:
        del self._open[number]
        self.host.end(number)
        self.inner.leave(number)


def add_rewards(total: Reward, turn: Reward) -> Reward:
    """Numbers, or components by name; 0 adds to either. Raises ValueError if turns mix both."""
    if isinstance(total, dict) and isinstance(turn, dict):
        return {name: total.get(name, 0.0) + turn.get(name, 0.0) for name in {**total, **turn}}
    if turn == 0.0:
        return total
    if total == 0.0:
        return turn
    if isinstance(total, dict) or isinstance(turn, dict):
        raise ValueError("the environment returned a number as the reward of one turn, and components as that of another")
    return total + turn
