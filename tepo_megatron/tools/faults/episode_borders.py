"""Borders within an episode: answers of verifiers, environments, agents and the model."""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tepo_megatron.config import RunConfig
from tepo_megatron.config.reward import EnvironmentConfig, RewardConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.tasks.environments.agent_session import AgentRequest, ChatAnswer, ChatRequest, RefusedError
from tepo_megatron.tasks.environments.environment_task import EnvironmentTask
from tepo_megatron.tasks.environments.episodes import Observations
from tepo_megatron.tasks.environments.protocol import EpisodeAnswer, StepResult
from tepo_megatron.tasks.environments.worker import EpisodeTable
from tepo_megatron.tasks.reward.pool import RewardPool
from tepo_megatron.tools.faults.hostile import NUMBERS, Hostile, border, chat_tokenizer, needs_unicode, refusable

# -- verifiers ---------------------------------------------------------------------------------------------------------------


class _Odd:
    """A response is the number of a value that this verifier returns, raises, or writes to its parent."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self._answers = answers

    def score(self, problem: Problem, response: str) -> Any:
        answer = 1.0 if response == "right" else self._answers[int(response)]
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, bytes):
            for file in range(3, 64):
                with suppress(OSError):
                    os.write(file, answer)
        return answer


def _odd_answer(random: Hostile) -> Any:
    values = [
        random.value(),
        random.spoilt({"right": 1.0, "brief": 0.5}),
        np.float64(random.choice((1e39, 0.5))),
        {1, 2},
        object(),
    ]
    raised = [kind(random.text()) for kind in (ValueError, KeyError, SystemExit, KeyboardInterrupt, MemoryError, StopIteration)]
    return random.choice([*values, random.choice(raised), b"not for the parent", type])


def _score(answers: Sequence[Any], *, neighbours: bool) -> None:
    with closing(RewardPool(RewardConfig(verifier="a.py:odd", timeout_s=20.0), custom=_Odd(answers))) as pool:
        problem = Problem("p", "1+1=", "2")
        texts = [text for number in range(len(answers)) for text in ("right", str(number))]
        results = pool.score([(problem, ResponseText(text)) for text in texts])
    for text, result in zip(texts, results, strict=True):
        assert result.reward is None or abs(result.reward) <= 1e15, f"the reward {result.reward}"
        assert result.error is None or (text != "right" or not neighbours), f"a neighbour failed: {result.error}"
        needs_unicode([result.error, dict(result.parts)])


@border("verifier")
def _verifier(folder: Path, random: Hostile) -> None:
    _score([answer for _ in range(8) if not isinstance(answer := _odd_answer(random), bytes)], neighbours=True)


@border("verifier's pipe")
def _pipe(folder: Path, random: Hostile) -> None:
    number = random.randrange(4)
    line = random.json([number, [[1.0, None]], 0.1, False])
    _score([(random.damaged(line) if random.random() < 0.2 else line) + b"\n"], neighbours=False)


# -- environments ------------------------------------------------------------------------------------------------------------


class _OddEnvironment:
    def __init__(self, first: Any, step: Any) -> None:
        self._first, self._step = first, step

    def reset(self, problem: Problem, seed: int) -> Any:
        self._hostile = problem.answer == "hostile"
        return self._first if self._hostile else "1"

    def step(self, action: ResponseText) -> Any:
        return self._step if self._hostile else StepResult("1", {"right": 1.0}, True)


class InProcess:
    """Answers by a function of (episode, call), in this process."""

    notice = None

    def __init__(self, answer: Callable[[int, list[Any]], EpisodeAnswer]) -> None:
        self._answer, self._ready = answer, list[EpisodeAnswer]()

    @property
    def busy(self) -> bool:
        return bool(self._ready)

    def call(self, episode: int, call: list[Any]) -> None:
        self._ready.append(self._answer(episode, call))

    def end(self, episode: int) -> None:
        self._ready = [item for item in self._ready if item.episode != episode]

    def poll(self, timeout_s: float) -> Sequence[EpisodeAnswer]:
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None: ...


class _Samples:
    weights_version = WeightsVersion(0)

    def __init__(self) -> None:
        self._pending: deque[Any] = deque()

    @property
    def unfinished(self) -> int:
        return len(self._pending)

    def __enter__(self) -> _Samples:
        return self

    def __exit__(self, *_: object) -> None: ...
    def leave(self, home: Any) -> None: ...

    def submit(self, key: Any, prompt_ids: Any, seed: int, *, room: int, home: Any) -> None:
        ids = [50, 0][:room]
        self._pending.append((key, 0, Response(ids, [-0.5] * len(ids), "stop", self.weights_version)))

    def next(self, timeout_s: float | None) -> Any:
        return self._pending.popleft() if self._pending else None


def _play(host: Any) -> None:
    config = RunConfig.model_validate(
        {"environment": {"name": "a.py:A", "max_turns": 3}, "reward": {"weights": {"right": 1.0}}}
    )
    problems = [Problem("p0", "1+1=", "hostile", {"a": 1}), Problem("p1", "1+1=", "sound")]
    with (
        patch.object(EnvironmentTask, "open_host", lambda *_: host),
        EnvironmentTask(config, chat_tokenizer(), 300, 200) as task,
    ):
        stream: Any = task.stream(_Samples(), problems.__getitem__)  # type: ignore[arg-type]
        with stream:
            for number in range(2):
                stream.submit(number, (4, 5), 7)
            while stream.unfinished:
                if (item := stream.next(1.0)) is not None:
                    number, _, response = item
                    task.submit(number, problems[number], ResponseText("", response.response_ids))
        results = dict(task.poll())
    assert results[1].error is None, f"a neighbour's episode failed: {results[1].error}"
    assert results[1].reward == 1.0, f"a neighbour's episode got the reward {results[1].reward}"
    assert results[0].reward is None or abs(results[0].reward) <= 1e15, f"the reward {results[0].reward}"
    needs_unicode([results[0].error, dict(results[0].parts)])


@border("environment")
def _environment(folder: Path, random: Hostile) -> None:
    sound = [{"role": "user", "content": random.text()}, {"role": "tool", "content": "b", "name": "c"}]
    odd = (random.value(), random.spoilt(sound), random.spoilt([1, 2]), {1: 2}, b"a", np.ones(2))
    first = "1" if random.random() < 0.6 else random.choice((random.text(), *odd))
    then: Any = random.choice((random.text(), sound, random.choice(odd)))
    reward = random.choice(({"right": random.choice(NUMBERS)}, random.value(), random.spoilt({"right": 1.0})))
    step = then if random.random() < 0.1 else StepResult(then, reward, random.random() < 0.5)
    setup = EnvironmentConfig(name="a.py:A", timeout_s=60.0).model_dump()
    table = EpisodeTable(
        {**setup, "name": f"{__name__}:_OddEnvironment", "kwargs": {"first": first, "step": step}, "agent": None}
    )

    def answer(episode: int, call: list[Any]) -> EpisodeAnswer:
        result = json.loads(json.dumps(asyncio.run(table.answer(episode, json.loads(json.dumps(call))))))
        if (observation := result.get("observation")) and observation[0] in ("text", "messages"):
            with refusable():
                ids = Observations(chat_tokenizer(), 300).ids(observation, ended=True)
                most = 0 if observation[0] == "text" else 2 * len(observation[1]) + 1  # the template's own
                assert (ids <= 3).sum() <= most, f"special tokens of {observation[1]!r}"
        return EpisodeAnswer(episode, result, result.pop("error", None))

    _play(InProcess(answer))


ANSWER = {"observation": ["text", "1"], "reward": {"right": 0.5}, "done": False, "tool_error": False}


@border("environment's pipe")
def _environment_answers(folder: Path, random: Hostile) -> None:
    chat = vars(
        ChatRequest(({"role": "user", "content": "a"},), begins=True, tools=({"type": "function", "function": {"name": "f"}},))
    )
    observation = random.choice(
        (["text", "1"], ["ids", [5]], ["messages", [{"role": "user", "content": "a"}]], ["chat", chat], None)
    )

    def answer(episode: int, call: list[Any]) -> EpisodeAnswer:
        if episode:
            ends = call[0] == "step"
            return EpisodeAnswer(episode, {**ANSWER, "reward": {"right": 1.0} if ends else 0.0, "done": ends})
        values = random.spoilt([0, {**ANSWER, "observation": observation}, None, None, False, 0.1])
        return EpisodeAnswer.read([0, *values[1:]] if isinstance(values, list) else values, episode)

    _play(InProcess(answer))


# -- requests of agents and trainers -----------------------------------------------------------------------------------------

_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_SAID = [{"role": "system", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [_CALL]}]
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
REQUEST = {
    "model": "m",
    "messages": [*_SAID, {"role": "user", "content": [{"type": "text", "text": "1"}]}],
    "tools": _TOOLS,
    "max_tokens": 9,
}


@border("agents' requests")
def _requests(folder: Path, random: Hostile) -> None:
    try:
        asked = AgentRequest.read(random.spoilt(REQUEST | {"temperature": 1.0, "n": 1}), {"temperature": 1.0}, frozenset())
    except RefusedError as refused:
        needs_unicode(refused.body())
        return
    request = json.loads(
        json.dumps(vars(ChatRequest(tuple(asked.messages), True, None if asked.tools is None else tuple(asked.tools))))
    )
    with refusable():
        Observations(chat_tokenizer(), 300).ids(["chat", request], ended=None)


@border("tool calls")
def _tool_calls(folder: Path, random: Hostile) -> None:
    call = random.json({"name": "f", "arguments": {"a": 1}}).decode("utf-8", "replace")
    action = ResponseText(f"{random.text()}<tool_call>{call}</tool_call>".encode("utf-8", "replace").decode(), (5,), "stop")
    answer = ChatAnswer.read(action, "hermes")
    completion = answer.completion("m", action)
    needs_unicode([completion, ChatAnswer.chunks(completion, usage=True)])
