"""The worker process of ``EnvironmentWorkers``. It reads and writes JSON lines, and imports neither torch nor NumPy.

Input: the fields of :data:`SETUP`, then lists of ``[call's number, episode's number, call]``. A call is ``["reset", [id,
prompt, answer, metadata, messages, source], seed, alone]``, ``["step", text, packed ids in base 64, finish reason, tokens
before]`` or ``["end"]``. Output: ``{"ready": true, "notice": …, "concurrent": …}`` or ``{"error": text}``, then ``[call's
number, answer, seconds, last]``; ``last``: the process ends. An answer is ``{"error": text}``, empty for ``end``, or a
:class:`StepResult` with the observation as ``["text", text]``, ``["ids", numbers]``, ``["messages", messages]``, ``["chat",
ChatRequest]`` or null. Answers are in order unless the environment is ``async``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from typing import Any

from tepo_megatron.runtime.text import echo, text_fault
from tepo_megatron.runtime.user_code import load_user_code, locate_user_code
from tepo_megatron.runtime.worker_child import (
    OPEN_FILES,
    has_a_free_file,
    has_grown,
    limit_file_size,
    limit_memory,
    limit_processor_time,
    place_of,
    reply,
    why_it_raised,
)
from tepo_megatron.tasks.environments.agent_session import ChatRequest, EpisodeError
from tepo_megatron.tasks.environments.builtin_environments import ADAPTERS
from tepo_megatron.tasks.environments.protocol import StepResult, read_action, read_problem
from tepo_megatron.tasks.reward.worker import WorkerChannel, check_value, open_channel, run_worker

SETUP = ("name", "adapter", "kwargs", "timeout_s", "memory_mb", "file_mb", "run_code")
"""Fields of ``environment`` in the setup, which also has ``concurrency``, ``network``, ``agent`` and ``path``."""

_FILES_OF_AGENT = 8


def main() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm warns all processes of a step; the trainer acts on it
    run_worker(_serve)


def _open_files(setup: Mapping[str, Any]) -> int:
    return OPEN_FILES + (_FILES_OF_AGENT * setup["concurrency"] if setup["agent"] else 0)


def _serve() -> None:
    channel = open_channel(_open_files)
    if channel is None:
        return
    setup, replies = {**channel.setup, "what": "environment", "section": "environment"}, channel.replies
    try:
        desk = EpisodeTable(setup)
    except ValueError as error:
        reply(replies, {"error": str(error)})
        return
    notice = channel.network and f"environments keep their network: {channel.network}"
    served = _Served(desk, setup, replies, limit_memory(setup["memory_mb"]))
    reply(replies, {"ready": True, "notice": notice, "concurrent": desk.concurrent})
    asyncio.run(_answer_all(served, channel) if desk.concurrent else _answer_in_turn(served, channel))


@dataclass
class _Served:
    desk: EpisodeTable
    setup: Mapping[str, Any]
    replies: FileIO
    loaded: int
    ended: bool = False
    running: set[asyncio.Task[None]] = field(default_factory=set)

    async def answer(self, number: int, episode: int, call: list[Any]) -> None:
        limit_processor_time(self.setup["timeout_s"])
        limit_file_size(self.setup["file_mb"])
        started = time.monotonic()
        answer = await self.desk.answer(episode, call)
        if not self.ended:
            grown = has_grown(self.loaded, self.setup["memory_mb"]) or not has_a_free_file() or self.desk.worn
            self.ended = grown and not self.desk
            reply(self.replies, [number, answer, time.monotonic() - started, self.ended])


async def _answer_in_turn(served: _Served, channel: WorkerChannel) -> None:
    while not served.ended:
        for call in channel.inbox.get():
            await served.answer(*call)


async def _answer_all(served: _Served, channel: WorkerChannel) -> None:
    loop = asyncio.get_running_loop()

    def begin(calls: Sequence[Any]) -> None:
        for call in calls:
            task = loop.create_task(served.answer(*call))
            served.running.add(task)
            task.add_done_callback(served.running.discard)

    channel.feed(begin)
    while not served.ended:
        await asyncio.sleep(1.0)
    os._exit(0)


BUILTIN: Mapping[str, str] = {
    "guess_number": "tepo_megatron.tasks.environments.builtin_environments:GuessNumber",
    "calculator": "tepo_megatron.tasks.environments.builtin_environments:Calculator",
    "python": "tepo_megatron.tasks.environments.builtin_environments:PythonTool",
}

OUTSIDE = "outside"  # external agents; nothing is imported

Answer = dict[str, Any]


def resolve_environment(name: str) -> str:
    """``module:Class``, ``/path/of/file.py:Class`` or ``outside``, not imported. Raises ValueError for an unknown one."""
    if ":" in name:
        return locate_user_code(name, f"the environment {name!r}")
    if name == OUTSIDE:
        return name
    if name not in BUILTIN:
        raise ValueError(
            f"unknown environment {name!r}; known: {', '.join(BUILTIN)}, or your own as path/file.py:Class or "
            "package.module:Class"
        )
    return BUILTIN[name]


class EpisodeTable:
    """``setup``: fields of ``environment``, and ``what`` and ``section``."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Raises ValueError if the environment cannot be made, or lacks ``reset`` or ``step``."""
        self._setup = setup
        self._agents: Any = None
        self._make = self._maker()
        self._episodes: dict[int, Any] = {}
        first = self._first()
        for method in ("reset", "step"):
            if not callable(getattr(first, method, None)):
                raise ValueError(
                    f"the environment {setup['name']!r} has no method {method}; an environment has reset and step "
                    "(docs/guides/environments.md), and one of another library needs environment.adapter"
                )
        self.concurrent = any(inspect.iscoroutinefunction(getattr(first, method)) for method in ("reset", "step"))

    def __bool__(self) -> bool:
        return bool(self._episodes)

    @property
    def worn(self) -> bool:
        return self._agents is not None and not self and self._agents.worn

    async def answer(self, number: int, call: Sequence[Any]) -> Answer:
        """Exceptions become answers; those of ``close`` are printed too, since the reward is already known."""
        kind, *arguments = call
        method: Callable[..., Any] = self._make
        timeout_s = self._setup["timeout_s"]
        try:
            async with asyncio.timeout(timeout_s) as limit:
                if kind == "end":
                    method = getattr(self._episodes.pop(number, None), "close", _nothing)
                    await _value(method())
                    return {}
                if kind == "reset":
                    self._episodes[number] = environment = self._make()
                    method = environment.reset
                    observation = await _value(method(read_problem(arguments[0]), seed=arguments[1]))
                    return self._checked(StepResult(observation), "reset", method)
                method = self._episodes[number].step
                return self._checked(await _value(method(read_action(arguments))), kind, method)
        except EpisodeError as failed:
            return {"error": str(failed)}
        # SystemExit too: an environment that calls sys.exit() must not end the worker.
        except BaseException as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            why = took_too_long(timeout_s, kind) if late else why_it_raised(error, method, self._setup)
            if kind == "end":
                echo(f"at the end of an episode: {why}", err=True)
            return {"error": why}

    def _maker(self) -> Callable[[], Any]:
        name, kwargs, adapter = self._setup["name"], self._setup["kwargs"], self._setup["adapter"]
        if adapter == "agent":
            self._agents = _agents(name, kwargs, self._setup)
            return self._agents.episode
        loaded = load_user_code(resolve_environment(name), f"the environment {name!r}")
        if getattr(loaded, "runs_code", False) and not self._setup["run_code"]:
            raise ValueError(
                f"the environment {name!r} runs programs that the model writes; set environment.run_code = true if you mean it"
            )
        return (lambda: ADAPTERS[adapter](loaded, kwargs)) if adapter != "none" else (lambda: loaded(**kwargs))

    def _first(self) -> Any:
        kwargs = self._setup["kwargs"]
        try:
            return self._make()
        except Exception as error:
            options = f"environment.kwargs {', '.join(kwargs)}" if kwargs else "no environment.kwargs"  # values may be private
            raised = f"it raised {type(error).__name__}: {error}"
            raise ValueError(f"the environment {self._setup['name']!r} cannot be made with {options}: {raised}") from error

    def _checked(self, result: Any, kind: str, method: Callable[..., Any]) -> Answer:
        def failed(why: str) -> Answer:
            return {"error": f"the environment's {kind} returned {why}{place_of(method)}"}

        if not isinstance(result, StepResult):
            return failed(f"{type(result).__name__}, not a StepResult")
        if kind == "reset" and isinstance(result.observation, StepResult):
            return failed("a StepResult: an episode ends at the earliest when the model has written something")
        reward, fault = check_value(result.reward, what="environment")
        if fault is not None:
            return {"error": f"{fault}{place_of(method)}"}
        observation, why = _observation(result.observation)
        if why is None and (fault := text_fault(observation)) is not None:
            why = f"an observation with {fault}"
        if why is not None:
            return failed(why)
        return {"observation": observation, "reward": reward, "done": bool(result.done), "tool_error": bool(result.tool_error)}


def took_too_long(timeout_s: float, kind: str) -> str:
    method = "close" if kind == "end" else kind
    return f"the environment took longer in {method} than environment.timeout_s = {timeout_s:g} s"


def _nothing() -> None: ...


def _agents(name: str, kwargs: Mapping[str, Any], setup: Mapping[str, Any]) -> Any:
    try:
        from tepo_megatron.tasks.environments.agents import Agents
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ValueError(
            "environment.adapter = agent needs aiohttp for the address that agents call; pip install 'tepo-megatron[agents]'"
        ) from error
    solve = None if name == OUTSIDE else load_user_code(resolve_environment(name), f"the agent {name!r}")
    return Agents(solve, kwargs, setup)


async def _value(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


def _observation(value: Any) -> tuple[list[Any] | None, str | None]:
    if isinstance(value, ChatRequest):
        return ["chat", value.as_json()], None
    if value is None or isinstance(value, str):
        return (["text", value] if value else None), None
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        return None, f"{type(value).__name__} as observation, which is neither text, token ids nor messages"
    if all(type(item) is int for item in value):
        return (["ids", list(value)] if value else None), None
    for item in value:
        if not isinstance(item, Mapping) or not isinstance(item.get("role"), str) or not isinstance(item.get("content"), str):
            return None, f"{str(item)[:60]!r} in its observation: neither a token id nor a message with role and content"
    messages = [dict(item) for item in value]
    try:
        json.dumps(messages)
    except (TypeError, ValueError) as error:
        return None, f"messages that JSON cannot hold ({error})"
    return ["messages", messages], None


if __name__ == "__main__":
    main()
