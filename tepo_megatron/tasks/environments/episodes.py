"""Drives episodes: servers sample turns, environments answer them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from tepo_megatron.config.reward import EnvironmentConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Response, TokenIds, token_ids
from tepo_megatron.runtime.text import check_text
from tepo_megatron.sampler.protocol import KeyedResponse, SampleStream, SubmitOptions, refuse_others
from tepo_megatron.sampler.sampling import append_observation, join_parts, prompt_seed
from tepo_megatron.tasks.data.problems import encode_prompt
from tepo_megatron.tasks.data.tokenizer import Tokenizer
from tepo_megatron.tasks.environments.protocol import EnvironmentHost, EpisodeAnswer
from tepo_megatron.tasks.reward.worker import check_value

_POLL_INTERVAL_S = 1.0

_MAX_RESTARTS = 20

_FAST_POLL_S = 0.005  # while the environments owe an answer

Reward = float | dict[str, float]


@dataclass(eq=False)
class Episode:
    """``reward``: sum over turns. ``new_histories``: conversations that the agent restarted."""

    key: Hashable
    index: int
    problem: Problem
    prompt: TokenIds
    seed: int  # the group's; a sample's is seed + index
    restarts: int = 0
    suspected: int = 0  # how often a worker ended during a call of this episode
    drawn: Response | None = None  # tokens up to the model's last one
    context: Response | None = None
    turns: int = 0
    reward: Reward = 0.0
    tool_errors: int = 0
    new_histories: int = 0
    most: int | None = None  # tokens; an agent sets it
    seconds: float = 0.0
    error: str | None = None


@dataclass
class EpisodeStream:
    """Exiting ends all episodes. The finish reason is the last turn's, or ``length`` at a limit. A failed episode has its
    tokens so far; ``note`` receives every ended one. ``numbers`` are never shared: ended episodes may still be answered.
    ``max_length``: tokens of prompt and turns.
    """

    inner: SampleStream
    host: EnvironmentHost
    problem_of: Callable[[Any], Problem]
    observations: Observations
    config: EnvironmentConfig
    max_length: int
    note: Callable[[Episode, Response], None]
    numbers: Iterator[int] = field(default_factory=count)
    _open: dict[int, Episode] = field(default_factory=dict)
    _ready: deque[KeyedResponse] = field(default_factory=deque)

    def __enter__(self) -> EpisodeStream:
        self.inner.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        for number in list(self._open):
            self._drop(number)
        self.inner.__exit__(*exception)

    @property
    def unfinished(self) -> int:
        return len(self._open) + len(self._ready)

    def submit(self, key: Hashable, prompt_ids: ArrayLike, seed: int, n: int = 1, **options: Unpack[SubmitOptions]) -> None:
        """Episodes cannot be continued: the environment's state is lost."""
        refuse_others(options, ("continued", "only"))
        assert not options.get("continued"), "episodes cannot be continued; the configuration refuses rollout.partial"
        only = options.get("only")
        for index in range(n) if only is None else only:
            self._begin(Episode(key, index, self.problem_of(key), token_ids(prompt_ids), seed))

    def next(self, timeout_s: float | None) -> KeyedResponse | None:
        """Also returns None if none is open. Raises RuntimeError if environments cannot run."""
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

    def _begin(self, episode: Episode) -> None:
        number = next(self.numbers)
        self._open[number] = episode
        self.host.call(number, ["reset", episode.problem.to_json(), episode.seed, episode.suspected > 0])

    def _room(self, prompt: int, behind: int) -> int:
        most, limit = self.max_length - prompt, self.config.max_tokens
        return min(most, most if limit is None else limit) - behind

    def _ask(self, number: int, episode: Episode) -> None:
        behind = token_ids(()) if episode.context is None else episode.context.response_ids
        seed = episode.seed + episode.index
        if episode.new_histories:  # the same conversation again must not have the same answer
            seed = prompt_seed(seed, episode.new_histories)
        if behind.size:
            seed = prompt_seed(seed, behind.size)
        room = self._room(episode.prompt.size, behind.size)
        room = room if episode.most is None else min(room, episode.most)
        self.inner.submit(number, np.concatenate([episode.prompt, behind]), seed, room=room, home=number)

    def _take_turn(self, number: Hashable, _: int, turn: Response) -> None:
        assert isinstance(number, int)
        episode = self._open.get(number)
        if episode is None:
            return  # its worker was lost, and the episode began again
        episode.drawn = turn if episode.context is None else join_parts(episode.context, turn)
        episode.turns += 1
        text = self.observations.tokenizer.decode(turn.response_ids.tolist())
        action = ResponseText(text, turn.response_ids, turn.finish_reason)
        action.prompt_tokens = episode.prompt.size + episode.drawn.response_ids.size - turn.response_ids.size
        self.host.call(number, ["step", *action.to_json()])

    def _take_answer(self, result: EpisodeAnswer) -> None:
        episode = self._open.get(result.episode)
        if episode is None:
            return
        episode.seconds += result.seconds
        if result.lost is not None:
            self._restart(result, episode)
            return
        try:
            if result.error is not None:
                raise ValueError(result.error)
            answer = result.answer
            episode.tool_errors += answer["tool_error"]
            reward, fault = check_value(answer["reward"], what="environment")  # a server may send anything
            if reward is None:
                raise ValueError(fault)
            episode.reward = _add_rewards(episode.reward, reward)
            if answer["done"] and episode.drawn is not None:
                self._finish(result.episode, episode.drawn.finish_reason)
            elif episode.turns >= self.config.max_turns:
                self._finish(result.episode, "length")
            else:
                self._go_on(result.episode, episode, answer["observation"])
        except ValueError as error:
            self._finish(result.episode, "stop", str(error))

    def _go_on(self, number: int, episode: Episode, observation: Sequence[Any] | None) -> None:
        if observation is not None and observation[0] == "chat":
            episode.most = observation[1]["max_tokens"]
            if observation[1]["begins"] and episode.drawn is not None:
                episode.drawn = episode.context = None
                episode.new_histories += 1
        drawn = episode.drawn
        ended = None if drawn is None else int(drawn.response_ids[-1]) in self.observations.tokenizer.eos_ids
        ids = self.observations.ids(observation, ended=ended, opening=episode.prompt, chat=episode.problem.messages)
        behind = (0 if drawn is None else drawn.response_ids.size) + ids.size
        if self._room(episode.prompt.size, behind) >= 1:
            episode.context = append_observation(drawn, ids) if ids.size else drawn
            self._ask(number, episode)
        elif drawn is not None:
            self._finish(number, "length")
        else:
            raise ValueError(
                f"the prompt's {episode.prompt.size} tokens and the {ids.size} that the environment begins with leave no "
                "room for a turn; raise environment.max_tokens, or shorten them"
            )

    def _restart(self, result: EpisodeAnswer, episode: Episode) -> None:
        suspected = episode.suspected + result.suspect
        if suspected > self.config.max_restarts or episode.restarts >= _MAX_RESTARTS:
            times = f" {suspected} times" if suspected > 1 else ""
            self._finish(result.episode, "stop", f"its worker ended{times} under it, the last time since {result.lost}")
            return
        self._drop(result.episode)
        same = (episode.key, episode.index, episode.problem, episode.prompt, episode.seed)
        self._begin(Episode(*same, restarts=episode.restarts + 1, suspected=suspected))

    def _finish(self, number: int, reason: str, error: str | None = None) -> None:
        episode = self._open[number]
        self._drop(number)
        response = Response((), (), "stop", self.inner.weights_version)
        if episode.drawn is not None:
            response = replace(episode.drawn, finish_reason=reason)
        episode.error = error
        self.note(episode, response)
        self._ready.append((episode.key, episode.index, response))

    def _drop(self, number: int) -> None:
        del self._open[number]
        self.host.end(number)
        self.inner.leave(number)


def _add_rewards(total: Reward, turn: Reward) -> Reward:
    """0 adds to numbers and to components. Raises ValueError for a mix."""
    if isinstance(total, dict) and isinstance(turn, dict):
        return {name: total.get(name, 0.0) + turn.get(name, 0.0) for name in {**total, **turn}}
    if turn == 0.0:
        return total
    if total == 0.0:
        return turn
    if isinstance(total, dict) or isinstance(turn, dict):
        raise ValueError("the environment returned a number as the reward of one turn, and components as that of another")
    return total + turn


@dataclass(frozen=True)
class Observations:
    """Without ``chat_template`` an agent's messages are read as plain text."""

    tokenizer: Tokenizer
    vocab_size: int
    chat_template: bool = True
    special_tokens: bool = False
    role: str | None = None

    def ids(
        self,
        observation: Sequence[Any] | None,
        *,
        ended: bool | None,
        opening: TokenIds | None = None,
        chat: Sequence[tuple[str, str]] = (),
    ) -> TokenIds:
        """``ended``: the preceding turn has an end token; None: there is none. ``opening``: an agent's prompt, left out of
        its chat. ``chat``: the problem's messages; the first text continues them. Raises ValueError for what cannot be encoded.
        """
        is_chat = self.role is not None and bool(chat)
        closing = self.tokenizer.open_chat_ids(chat)[1] if is_chat and ended is None else []
        if observation is None:
            return token_ids(closing)
        check_text(observation, "the environment's observation")
        kind, value = observation
        if is_chat and kind == "text":
            if ended is None:
                return self._known([*self._encode(f"\n\n{value}"), *closing], value)
            kind, value = "messages", [{"role": self.role, "content": value}]
        if kind == "chat":
            return self._chat(value, ended=ended, opening=opening)
        if kind == "ids":
            return self._checked([*closing, *value])
        if kind == "text":
            return self._known(self._encode(value), value)
        if ended is None:
            raise ValueError(
                "the environment's reset returned messages, but the prompt that begins a chat is the data's: give the problem "
                "messages, and return text, token ids or None from reset"
            )
        pairs = [(str(message["role"]), str(message["content"])) for message in value]
        return self._known(self.tokenizer.turn_ids(pairs, ended=ended), " ".join(content for _, content in pairs))

    def _chat(self, request: Mapping[str, Any], *, ended: bool | None, opening: TokenIds | None) -> TokenIds:
        messages, tools = request["messages"], request["tools"]
        text = " ".join(message["content"] for message in messages)
        if not self.chat_template:
            if tools:
                raise ValueError(
                    "the agent sends tools, which need a chat template; set environment.agent.chat_template = true, or have "
                    "the agent describe its tools in a message"
                )
            return self._known([token for message in messages for token in self._encode(message["content"])], text)
        if not request["begins"]:
            return self._known(self.tokenizer.turn_ids(messages, ended=bool(ended)), text)
        ids = self._known(self.tokenizer.chat_ids(messages, tools=tools), text)
        if opening is None:
            return ids
        if ids[: opening.size].tolist() != opening.tolist():
            raise ValueError(
                f"the agent's chat begins with token {ids[:1].tolist()} in the model's chat template, and others begin with "
                f"{opening.tolist()}: all prompts of a run begin alike; use another template, or chat_template = false"
            )
        return ids[opening.size :]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, special_tokens=self.special_tokens)

    def _checked(self, ids: Sequence[int]) -> TokenIds:
        for index, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"the environment returned {token} as token {index} of its observation, which is no token of the model's "
                    f"vocabulary of {self.vocab_size}"
                )
        return token_ids(ids)

    def _known(self, ids: Sequence[int], text: str) -> TokenIds:
        unknown = self.tokenizer.unk_id
        if unknown is not None and unknown in ids:
            lost = [character for character in dict.fromkeys(text) if unknown in self._encode(character)] or [text[:60]]
            raise ValueError(
                f"the environment's observation has characters that the tokenizer does not know: {''.join(lost)[:60]!r}; "
                "change it, or use a model whose tokenizer knows them"
            )
        return token_ids(ids)


def episode_prompt(environment: EnvironmentConfig | None, tokenizer: Tokenizer, problem: Problem) -> tuple[int, ...]:
    """Returns what precedes the first observation. A chat's last message stays open for it. Raises ValueError."""
    if (opening := opening_of(environment, tokenizer)) is not None:
        return opening
    prompt = encode_prompt(tokenizer, problem)
    is_open = environment is not None and environment.role is not None and problem.messages
    return tuple(tokenizer.open_chat_ids(problem.messages)[0]) if is_open else prompt


def opening_of(environment: EnvironmentConfig | None, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """Returns the token that begins every chat, None without agents. Raises ValueError if there is no such token."""
    if environment is None or environment.adapter != "agent":
        return None
    if not environment.agent_settings.chat_template:
        begin = tokenizer.prompt_ids("")
        if not begin:
            raise ValueError(
                "environment.agent.chat_template = false: the model's tokenizer has no begin token, behind which an agent's "
                "words could be read; use a model with a chat template"
            )
        return tuple(begin[:1])
    try:
        return tuple(tokenizer.chat_ids([("user", "?")])[:1])
    except ValueError as error:
        raise ValueError(
            f"environment.adapter = agent: {error}; or set environment.agent.chat_template = false, and the contents of "
            "messages are read as they stand"
        ) from error
