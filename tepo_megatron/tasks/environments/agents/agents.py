"""Agents as environments: a function that calls the model becomes ``reset`` and ``step``."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.workers.failure import why_it_raised
from tepo_megatron.tasks.environments.agents.agent_session import AgentEnd, AgentSession, EpisodeError
from tepo_megatron.tasks.environments.agents.chat_address import ChatAddress
from tepo_megatron.tasks.environments.agents.chat_requests import ChatRequest
from tepo_megatron.tasks.environments.protocol import StepResult
from tepo_megatron.tasks.reward.verifiers import load_verifier

_STACK_BYTES = 2 * 2**20
"""One thread per episode; its stack counts to ``environment.memory_mb``."""

_MAX_RUNNING_AGENTS = 32
"""More agents that still run after their episodes end their process."""


class Agents:
    """``solve`` None: external agents fetch the episodes. Raises ValueError if ``name`` is no function of (problem, base_url,
    api_key), or the verifier is invalid.
    """

    def __init__(self, solve: Callable[..., Any] | None, kwargs: Mapping[str, Any], setup: Mapping[str, Any]) -> None:
        settings = setup["agent"]
        self.solve, self.kwargs, self.setup = solve, kwargs, setup
        if solve is not None:
            self._takes_seed = _takes_seed(solve, kwargs, setup["name"])
        self.verify = None if settings["verifier"] is None else load_verifier(settings["verifier"])
        if self.verify is not None and (inspect.isclass(self.verify) or not callable(self.verify)):
            raise ValueError(f"environment.agent.verifier = {settings['verifier']} must be a function of one response")
        self.address = ChatAddress(
            settings["sampling"],
            frozenset(settings["ignore"]),
            port=settings["port"],
            max_request_bytes=settings["max_request_mb"] * 10**6,
            outside_key=settings["key"],
        )
        self._threads: list[threading.Thread] = []

    def episode(self) -> _AgentEpisode:
        settings = self.setup["agent"]
        return _AgentEpisode(self, AgentSession(settings["history"], settings["tool_calls"], reward_ends=self.solve is None))

    @property
    def worn(self) -> bool:
        """Whether too many agents still run after their episodes."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return len(self._threads) > _MAX_RUNNING_AGENTS

    async def begin(self, problem: Problem, seed: int, talk: AgentSession, key: str) -> None:
        url = await self.address.url()
        if self.solve is None:
            self.address.offer(_as_json(problem), key, seed)
            return
        loop = asyncio.get_running_loop()
        arguments = {**self.kwargs, "base_url": url, "api_key": key, **({"seed": seed} if self._takes_seed else {})}

        def run() -> None:
            ended = _run(self.solve, problem, arguments)
            loop.call_soon_threadsafe(talk.end, ended)

        # One thread per agent: agents may block, and async ones may run their own event loop.
        thread = threading.Thread(target=run, name="agent", daemon=True)
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
        self._threads = [*(thread_ for thread_ in self._threads if thread_.is_alive()), thread]


class _AgentEpisode:
    def __init__(self, agents: Agents, talk: AgentSession) -> None:
        self._agents, self._talk = agents, talk
        self._key = ""
        self._problem: Problem | None = None
        self._last = ResponseText("")

    async def reset(self, problem: Problem, seed: int) -> ChatRequest:
        self._problem = problem
        self._key = self._agents.address.open(self._talk)
        await self._agents.begin(problem, seed, self._talk, self._key)
        request = await self._talk.wait()
        if isinstance(request, ChatRequest):
            return request
        self._check(request)
        raise EpisodeError("the agent ended without asking the model anything")

    async def step(self, action: ResponseText) -> StepResult:
        self._last = action
        self._talk.give(action)
        mistake = self._talk.malformed
        request = await self._talk.wait()
        if isinstance(request, ChatRequest):
            asked: Any = request  # an observation that only this package makes
            return StepResult(asked, tool_error=mistake)
        self._check(request)
        return StepResult(reward=self._reward(request.result), done=True, tool_error=mistake)

    def close(self) -> None:
        self._agents.address.close(self._key)
        self._talk.close()

    def _check(self, ended: AgentEnd) -> None:
        if ended.error is not None:
            assert self._agents.solve is not None
            raise EpisodeError(why_it_raised(ended.error, self._agents.solve, {**self._agents.setup, "what": "agent"}))

    def _reward(self, result: Any) -> Any:
        if result is not None and not isinstance(result, str):
            return result
        if result is None and self._talk.posted is not None:
            return self._talk.posted
        if self._agents.verify is None:
            what = "text" if isinstance(result, str) else "nothing"
            raise EpisodeError(
                f"the agent returned {what}, and no reward; return a number, send one to /v1/reward, or set "
                "environment.agent.verifier"
            )
        action = self._last
        answer = action if result is None else ResponseText(result, action.token_ids, action.finish_reason)
        try:
            return self._agents.verify(self._problem, answer)
        except Exception as error:
            sentence = why_it_raised(error, self._agents.verify, {**self._agents.setup, "what": "verifier"})
            raise EpisodeError(sentence) from error


def _run(solve: Callable[..., Any] | None, problem: Problem, given: Mapping[str, Any]) -> AgentEnd:
    """Runs in its own thread."""
    assert solve is not None
    try:
        result = solve(problem, **given)
        return AgentEnd(asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result)
    except BaseException as error:  # SystemExit too: it must end the episode, not silently the thread
        return AgentEnd(error=error)


async def _awaited(found: Any) -> Any:
    return await found


def _takes_seed(solve: Callable[..., Any], kwargs: Mapping[str, Any], name: str) -> bool:
    try:
        signature = inspect.signature(solve)
        parameters = signature.parameters.values()
        takes = "seed" not in kwargs and any(
            parameter.name == "seed" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
        )
        signature.bind(None, base_url="", api_key="", **({"seed": 0} if takes else {}), **kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the agent {name!r} is called with (problem, base_url=…, api_key=…) and environment.kwargs, which it does not "
            f"take ({error})"
        ) from error
    return takes


def _as_json(problem: Problem) -> dict[str, Any]:
    messages = [{"role": role, "content": content} for role, content in problem.messages]
    return {
        "id": problem.id,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "metadata": dict(problem.metadata),
        "messages": messages or [{"role": "user", "content": problem.prompt}],
    }
