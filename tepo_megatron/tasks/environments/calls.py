"""The episodes of one worker process: made, asked, and what they answer checked. Imports no NumPy.

A call is ``["reset", [id, prompt, answer, metadata, messages, source], seed, alone]``, ``["step", text, packed ids in base 64,
finish reason, tokens before]`` or ``["end"]``. Its answer is ``{"error": sentence}``, or what a :class:`StepResult` holds, the
observation as ``["text", text]``, ``["ids", numbers]``, ``["messages", messages]``, ``["chat", a ChatRequest's]`` or null;
to ``["end"]`` nothing else.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tepo_megatron.runtime.user_code import load_user_code, locate_user_code
from tepo_megatron.runtime.workers.failure import place_of, why_it_raised
from tepo_megatron.tasks.environments.adapters import ADAPTERS
from tepo_megatron.tasks.environments.agents.agent_session import EpisodeError
from tepo_megatron.tasks.environments.agents.chat_requests import ChatRequest
from tepo_megatron.tasks.environments.host import read_action, read_problem
from tepo_megatron.tasks.environments.protocol import StepResult
from tepo_megatron.tasks.reward.calls import check_value

BUILTIN: Mapping[str, str] = {
    "guess_number": "tepo_megatron.tasks.environments.games:GuessNumber",
    "calculator": "tepo_megatron.tasks.environments.calculator:Calculator",
    "python": "tepo_megatron.tasks.environments.python_tool:PythonTool",
}
"""The environments that ship with the package, as ``module:class``."""

OUTSIDE = "outside"
"""Agents that run elsewhere; there is nothing to import."""

Answer = dict[str, Any]


def resolve_environment(name: str) -> str:
    """Returns where an environment is, without importing it: ``module:Class``, or ``/path/of/file.py:Class``; ``outside`` as it
    is.

    Raises ValueError: neither a built-in one, nor of one of these forms, nor in a file that is there.
    """
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


class Desk:
    """Episodes by their numbers. ``setup``: fields of ``environment`` by their names, and how it is called in sentences."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Raises ValueError: the environment cannot be imported or made, or has no ``reset`` and ``step``."""
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
        """Whether several episodes may be asked at once."""

    def __bool__(self) -> bool:
        return bool(self._episodes)

    @property
    def worn(self) -> bool:
        """Whether too many of the agents that it ran go on after their episodes."""
        return self._agents is not None and not self and self._agents.worn

    async def answer(self, number: int, call: Sequence[Any]) -> Answer:
        """Answers a call to an episode, within its limit of time where it is ``async``. Nothing that the environment does
        raises here. What goes wrong with its ``close`` is printed too: the episode is over, and has its reward.
        """
        kind, *given = call
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
                    observation = await _value(method(read_problem(given[0]), seed=given[1]))
                    return self._checked(StepResult(observation), "reset", method)
                method = self._episodes[number].step
                return self._checked(await _value(method(read_action(given))), kind, method)
        except EpisodeError as failed:
            return {"error": str(failed)}
        # SystemExit too: an environment that calls sys.exit() must not end the worker.
        except BaseException as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            why = took_too_long(timeout_s, kind) if late else why_it_raised(error, method, self._setup)
            if kind == "end":
                sys.stderr.write(f"at the end of an episode: {why}\n")
            return {"error": why}

    def _maker(self) -> Callable[[], Any]:
        name, kwargs, adapter = self._setup["name"], self._setup["kwargs"], self._setup["adapter"]
        if adapter == "agent":
            self._agents = _agents(name, kwargs, self._setup)
            return self._agents.episode
        found = load_user_code(resolve_environment(name), f"the environment {name!r}")
        if getattr(found, "runs_code", False) and not self._setup["run_code"]:
            raise ValueError(
                f"the environment {name!r} runs programs that the model writes; set environment.run_code = true if you mean it"
            )
        return (lambda: ADAPTERS[adapter](found, kwargs)) if adapter != "none" else (lambda: found(**kwargs))

    def _first(self) -> Any:
        """One that is made only to see that it can be."""
        kwargs = self._setup["kwargs"]
        try:
            return self._make()
        except Exception as error:
            given = f"environment.kwargs {', '.join(kwargs)}" if kwargs else "no environment.kwargs"  # values may be private
            raised = f"it raised {type(error).__name__}: {error}"
            raise ValueError(f"the environment {self._setup['name']!r} cannot be made with {given}: {raised}") from error

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
        found, why = _observation(result.observation)
        if why is not None:
            return failed(why)
        return {"observation": found, "reward": reward, "done": bool(result.done), "tool_error": bool(result.tool_error)}


def took_too_long(timeout_s: float, kind: str) -> str:
    """The sentence for a limit of time."""
    method = "close" if kind == "end" else kind
    return f"the environment took longer in {method} than environment.timeout_s = {timeout_s:g} s"


def _nothing() -> None:
    """What an environment without ``close`` does at its end."""


def _agents(name: str, kwargs: Mapping[str, Any], setup: Mapping[str, Any]) -> Any:
    try:
        from tepo_megatron.tasks.environments.agents.agents import Agents
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


def _observation(given: Any) -> tuple[list[Any] | None, str | None]:
    """An observation as it travels, or why it is none."""
    if isinstance(given, ChatRequest):
        return ["chat", given.as_json()], None
    if given is None or isinstance(given, str):
        return (["text", given] if given else None), None
    given = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        return None, f"{type(given).__name__} as observation, which is neither text, token ids nor messages"
    if all(type(each) is int for each in given):
        return (["ids", list(given)] if given else None), None
    for each in given:
        if not isinstance(each, Mapping) or not isinstance(each.get("role"), str) or not isinstance(each.get("content"), str):
            return None, f"{str(each)[:60]!r} in its observation: neither a token id nor a message with role and content"
    messages = [dict(each) for each in given]
    try:
        json.dumps(messages)
    except (TypeError, ValueError) as error:
        return None, f"messages that JSON cannot hold ({error})"
    return ["messages", messages], None
