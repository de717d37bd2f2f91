"""The worker process of ``EnvironmentWorkers``, which imports neither torch nor NumPy (``runtime.worker_child``).

A call is ``[number, episode's number, call]`` with ``["reset", problem, seed, alone]``, ``["step", *response]`` (as their
``to_json``) or ``["end"]``. An answer is ``{"error": text}``, empty for ``end``, or a ``StepResult``; its observation is
``["text", text]``, ``["ids", numbers]``, ``["messages", messages]``, ``["chat", ChatRequest]`` or null.
"""

import asyncio
import inspect
import json
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.text import echo, text_fault
from tepo_megatron.runtime.user_code import load_user_code, locate_user_code, unknown
from tepo_megatron.runtime.worker_child import OPEN_FILES, WorkerLimits, place_of, serve, time_limit
from tepo_megatron.tasks.environments.agent_session import ChatRequest, EpisodeError
from tepo_megatron.tasks.environments.builtin_environments import ADAPTERS
from tepo_megatron.tasks.environments.protocol import StepResult, awaited
from tepo_megatron.tasks.reward.worker import check_value

_FILES_OF_EPISODE = 8


def _open_files(setup: Mapping[str, Any]) -> int:
    return OPEN_FILES + _FILES_OF_EPISODE * setup["concurrency"]


_CLASSES = {"guess_number": "GuessNumber", "calculator": "Calculator", "python": "PythonTool"}
BUILTIN = {name: f"tepo_megatron.tasks.environments.builtin_environments:{of}" for name, of in _CLASSES.items()}

OUTSIDE = "outside"  # external agents; nothing is imported

_Answer = dict[str, Any]


def resolve_environment(name: str) -> str:
    """``module:Class``, ``/path/of/file.py:Class`` or ``outside``, not imported. Raises ValueError for an unknown one."""
    if ":" in name:
        return locate_user_code(name, f"the environment {name!r}")
    if name == OUTSIDE:
        return name
    if name not in BUILTIN:
        raise unknown("environment", name, BUILTIN, form="Class")
    return BUILTIN[name]


class EpisodeTable:
    facts: Mapping[str, Any] = {}

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Raises ValueError for an environment that cannot be made or lacks ``reset`` or ``step``."""
        self._setup, self._limits = setup, WorkerLimits.of("environment", "environment", setup)
        self._runner = asyncio.Runner()
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

    @property
    def busy(self) -> bool:
        return bool(self._episodes)

    @property
    def worn(self) -> bool:
        return self._agents is not None and self._agents.are_too_many(len(self._episodes))

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._runner.run(coroutine)

    async def answer(self, number: int, call: Sequence[Any]) -> _Answer:
        """Exceptions become answers; those of ``close`` are printed too."""
        kind, *arguments = call
        method: Callable[..., Any] = self._make
        try:
            async with time_limit(self._limits.timeout_s) as limit:
                if kind == "end":
                    method = getattr(self._episodes.pop(number, None), "close", lambda: None)
                    await awaited(method())
                    return {}
                if kind == "reset":
                    self._episodes[number] = environment = self._make()
                    method = environment.reset
                    observation = await awaited(method(Problem.from_json(*arguments[0]), seed=arguments[1]))
                    return self._checked(StepResult(observation), "reset", method)
                method = self._episodes[number].step
                return self._checked(await awaited(method(ResponseText.from_json(*arguments))), kind, method)
        except EpisodeError as failed:
            return {"error": str(failed)}
        # SystemExit too: an environment that calls sys.exit() must not end the worker.
        except BaseException as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            where = "close" if kind == "end" else kind
            why = self._limits.took_too_long(where) if late else self._limits.raised(error, method)
            if kind == "end":
                echo(f"at the end of an episode: {why}", err=True)
            return {"error": why}

    def _maker(self) -> Callable[[], Any]:
        name, kwargs, adapter = self._setup["name"], self._setup["kwargs"], self._setup["adapter"]
        if adapter == "agent":
            self._agents = _agents(name, kwargs, self._setup, self._limits)
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
        except (Exception, SystemExit) as error:
            options = f"environment.kwargs {', '.join(kwargs)}" if kwargs else "no environment.kwargs"  # values may be private
            raised = f"it raised {type(error).__name__}: {error}"
            raise ValueError(f"the environment {self._setup['name']!r} cannot be made with {options}: {raised}") from error

    def _checked(self, result: Any, kind: str, method: Callable[..., Any]) -> _Answer:
        try:
            if not isinstance(result, StepResult):
                raise ValueError(f"{type(result).__name__}, not a StepResult")
            if kind == "reset" and isinstance(result.observation, StepResult):
                raise ValueError("a StepResult: an episode ends at the earliest when the model has written something")
            reward, fault = check_value(result.reward, what="environment")
            if fault is not None:
                return {"error": f"{fault}{place_of(method)}"}
            observation = _observation(result.observation)
            if (fault := text_fault(observation)) is not None:
                raise ValueError(f"an observation with {fault}")
        except ValueError as why:
            return {"error": f"the environment's {kind} returned {why}{place_of(method)}"}
        return {"observation": observation, "reward": reward, "done": bool(result.done), "tool_error": bool(result.tool_error)}


def _agents(name: str, kwargs: Mapping[str, Any], setup: Mapping[str, Any], limits: WorkerLimits) -> Any:
    try:
        from tepo_megatron.tasks.environments.agents import Agents
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ValueError(
            "environment.adapter = agent needs aiohttp for the address that agents call; pip install 'tepo-megatron[agents]'"
        ) from error
    # Or clients of the agent, also those that its imports make, would send prompts and keys to a proxy.
    listed = [os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY")]
    direct = "*" if "*" in listed else ",".join(filter(None, dict.fromkeys([*listed, "127.0.0.1"])))  # a star must be alone
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = direct
    solve = None if name == OUTSIDE else load_user_code(resolve_environment(name), f"the agent {name!r}")
    return Agents(solve, kwargs, setup, limits)


def _observation(value: Any) -> list[Any] | None:
    if isinstance(value, ChatRequest):
        return ["chat", vars(value)]
    if value is None or isinstance(value, str):
        return ["text", value] if value else None
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise ValueError(f"{type(value).__name__} as observation, which is neither text, token ids nor messages")
    if all(type(item) is int for item in value):
        return ["ids", list(value)] if value else None
    for item in value:
        if not isinstance(item, Mapping) or not isinstance(item.get("role"), str) or not isinstance(item.get("content"), str):
            raise ValueError(f"{str(item)[:60]!r} in its observation: neither a token id nor a message with role and content")
    messages = [dict(item) for item in value]
    try:
        json.dumps(messages)
    except (TypeError, ValueError) as error:
        raise ValueError(f"messages that JSON cannot hold ({error})") from error
    return ["messages", messages]


if __name__ == "__main__":
    serve(EpisodeTable, "environment", _open_files)
