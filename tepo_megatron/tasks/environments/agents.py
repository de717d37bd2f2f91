"""Agents as environments: they call the model on loopback by the OpenAI protocol."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import json
import logging
import secrets
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from aiohttp import web

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.text import echo, read_json
from tepo_megatron.runtime.worker_child import WorkerLimits
from tepo_megatron.tasks.environments.agent_session import (
    AgentRequest,
    AgentSession,
    ChatAnswer,
    ChatRequest,
    EpisodeError,
    RefusedError,
)
from tepo_megatron.tasks.environments.protocol import StepResult, Strangers, awaited, takes_seed
from tepo_megatron.tasks.reward.verifiers import load_verifier

_STACK_BYTES = 2 * 2**20  # per episode; counts to environment.memory_mb

_MAX_RUNNING_AGENTS = 32  # a process with more agents left from ended episodes ends


class Agents:
    """``solve`` None: external agents. Raises ValueError unless ``name`` is a function of (problem, base_url, api_key)."""

    def __init__(
        self, solve: Callable[..., Any] | None, kwargs: Mapping[str, Any], setup: Mapping[str, Any], limits: WorkerLimits
    ) -> None:
        self._settings = settings = setup["agent"]
        self.solve, self.kwargs, self.limits = solve, kwargs, limits
        if solve is not None:
            self._takes_seed = _takes_seed(solve, kwargs, setup["name"])
        self.verify = None if settings["verifier"] is None else load_verifier(settings["verifier"])
        if self.verify is not None and (inspect.isclass(self.verify) or not callable(self.verify)):
            raise ValueError(f"environment.agent.verifier = {settings['verifier']} must be a function of one response")
        self.address = _ChatAddress(settings)
        self._threads: list[threading.Thread] = []

    def episode(self) -> _AgentEpisode:
        history, tool_calls = self._settings["history"], self._settings["tool_calls"]
        return _AgentEpisode(self, AgentSession(history, tool_calls, reward_ends=self.solve is None))

    def are_too_many(self, open_episodes: int) -> bool:
        """Agents of open episodes are not left behind."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return len(self._threads) - open_episodes > _MAX_RUNNING_AGENTS

    async def begin(self, problem: Problem, seed: int, session: AgentSession, key: str) -> None:
        url = await self.address.url()
        solve = self.solve
        if solve is None:
            messages = [{"role": role, "content": content} for role, content in problem.messages]
            shown = {
                "id": problem.id,
                "prompt": problem.prompt,
                "answer": problem.answer,
                "metadata": dict(problem.metadata),
                "messages": messages or [{"role": "user", "content": problem.prompt}],
            }
            self.address.offers.put_nowait({"problem": shown, "base_url": url, "api_key": key, "seed": seed})
            return
        loop = asyncio.get_running_loop()
        arguments = {**self.kwargs, "base_url": url, "api_key": key, **({"seed": seed} if self._takes_seed else {})}

        def run() -> None:
            result, error = None, None
            try:
                result = solve(problem, **arguments)
                result = asyncio.run(awaited(result)) if inspect.isawaitable(result) else result
            except BaseException as raised:  # SystemExit too: it must end the episode, not silently the thread
                error = raised
            try:
                loop.call_soon_threadsafe(session.end, result, error)
            except RuntimeError:
                if not loop.is_closed():  # closed: the worker has ended, and nobody waits for this episode
                    raise

        # A thread each: agents may block, and async ones may run their own event loop.
        thread = threading.Thread(target=run, name="agent", daemon=True)
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
        self._threads.append(thread)


class _AgentEpisode:
    def __init__(self, agents: Agents, session: AgentSession) -> None:
        self._agents, self._session = agents, session
        self._key = ""
        self._problem: Problem | None = None

    async def reset(self, problem: Problem, seed: int) -> ChatRequest:
        self._problem = problem
        self._key = self._agents.address.open(self._session)
        await self._agents.begin(problem, seed, self._session, self._key)
        request = await self._next()
        if request is None:
            raise EpisodeError("the agent ended without asking the model anything")
        return request

    async def step(self, action: ResponseText) -> StepResult:
        malformed = self._session.give(action)
        request: Any = await self._next()  # only this package makes such an observation
        if request is not None:
            return StepResult(request, tool_error=malformed)
        return StepResult(reward=self._reward(action), done=True, tool_error=malformed)

    def close(self) -> None:
        self._agents.address.sessions.pop(self._key, None)
        self._session.close()

    async def _next(self) -> ChatRequest | None:
        request = await self._session.wait()
        if request is None and self._session.error is not None:
            assert self._agents.solve is not None
            raise EpisodeError(replace(self._agents.limits, what="agent").raised(self._session.error, self._agents.solve))
        return request

    def _reward(self, action: ResponseText) -> Any:
        result = self._session.result
        if result is not None and not isinstance(result, str):
            return result
        if result is None and self._session.posted is not None:
            return self._session.posted
        if self._agents.verify is None:
            what = "text" if isinstance(result, str) else "nothing"
            raise EpisodeError(
                f"the agent returned {what}, and no reward; return a number, send one to /v1/reward, or set "
                "environment.agent.verifier"
            )
        answer = action if result is None else ResponseText(result, action.token_ids, action.finish_reason)
        try:
            return self._agents.verify(self._problem, answer)
        except Exception as error:
            raise EpisodeError(replace(self._agents.limits, what="verifier").raised(error, self._agents.verify)) from error


def _takes_seed(solve: Callable[..., Any], kwargs: Mapping[str, Any], name: str) -> bool:
    try:
        signature = inspect.signature(solve)
        takes = "seed" not in kwargs and takes_seed(signature)
        signature.bind(None, base_url="", api_key="", **({"seed": 0} if takes else {}), **kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the agent {name!r} is called with (problem, base_url=…, api_key=…) and environment.kwargs, which it does not "
            f"take ({error})"
        ) from error
    return takes


_HOST = "127.0.0.1"
_LONGEST_WAIT_S = 60.0
_SILENT = logging.Logger("silent", logging.CRITICAL + 1)


class _ChatAddress:
    """``POST /v1/chat/completions`` and ``/v1/reward``, ``GET /v1/models``, for external agents ``POST /episodes``. Keys
    identify episodes. Used from one event loop.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self.sessions: dict[str, AgentSession] = {}  # by key
        self.offers: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()  # episodes for external agents
        self._starting: asyncio.Task[str] | None = None
        self._strangers = Strangers()

    async def url(self) -> str:
        """The first call starts the server, or the next if that failed. Raises OSError if the port is not available."""
        if self._starting is None or (self._starting.done() and self._starting.exception()):
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    def open(self, session: AgentSession) -> str:
        key = f"tepo-{secrets.token_urlsafe(24)}"
        self.sessions[key] = session
        return key

    async def _start(self) -> str:
        app = web.Application(client_max_size=self._settings["max_request_mb"] * 10**6, middlewares=[_with_errors])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/reward", self._reward),
                web.get("/v1/models", self._models),
                web.post("/episodes", self._episode),
            ]
        )
        # A client that disconnects may ask the same once more. aiohttp logs faults of strangers' requests with a traceback.
        runner = web.AppRunner(app, access_log=None, logger=_SILENT, handler_cancellation=True)
        await runner.setup()
        handler: Any = runner.server
        loop, port = asyncio.get_running_loop(), self._settings["port"]
        try:
            server = await loop.create_server(lambda: _Connection(handler(), self._strangers), _HOST, port)
        except OSError as error:
            await runner.cleanup()
            raise OSError(
                f"environment.agent.port = {port} cannot be listened on ({error.strerror or error}); give another, or 0"
            ) from error
        return f"http://{_HOST}:{server.sockets[0].getsockname()[1]}/v1"

    def _session(self, request: web.Request) -> AgentSession:
        session = self.sessions.get(_key_of(request))
        if session is None:
            raise RefusedError(
                "no episode has this API key: it is over, or the agent does not send the key that it was given",
                status=401,
                code="invalid_api_key",
            )
        self._strangers.discard(request.transport)
        return session

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        again = request.headers.get("x-stainless-retry-count", "0") != "0"  # OpenAI's clients count
        try:
            asked = AgentRequest.read(await _body(request), self._settings["sampling"], frozenset(self._settings["ignore"]))
            answer = await session.ask(asked, again=again)
        except RefusedError as refused:
            if refused.code != "episode_over":
                session.refuse(str(refused))
            raise
        if not asked.stream:
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Cache-Control": "no-cache", "Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in ChatAnswer.chunks(answer, usage=asked.usage_in_stream):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        try:
            body = await _body(request)
            if not isinstance(body, dict) or body.get("reward") is None:
                raise RefusedError('a reward is sent as {"reward": 1.0}, or with components by name', param="reward")
        except RefusedError as refused:
            session.refuse(str(refused))
            raise
        session.post(body["reward"])
        return web.json_response({"reward": body["reward"]})

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "tepo_megatron"}
        return web.json_response({"object": "list", "data": [model]})

    async def _episode(self, request: web.Request) -> web.Response:
        key = self._settings["key"]
        if key is None:
            raise RefusedError("this run has no agents outside (environment.name = outside)", status=404)
        if not hmac.compare_digest(_key_of(request).encode(errors="surrogateescape"), key.encode()):
            raise RefusedError("another key than that of environment.agent.key_file", status=401, code="invalid_api_key")
        self._strangers.discard(request.transport)
        try:
            async with asyncio.timeout(_LONGEST_WAIT_S):
                offer = await self.offers.get()
                while offer["api_key"] not in self.sessions:  # the episode ended before it was fetched
                    offer = await self.offers.get()
        except TimeoutError:
            return web.Response(status=204)
        return web.json_response(offer)


def _key_of(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ").strip()


class _Connection(asyncio.Protocol):
    def __init__(self, handler: asyncio.Protocol, strangers: Strangers) -> None:
        self._handler, self._strangers = handler, strangers
        self._transport: asyncio.BaseTransport | None = None
        self.data_received, self.eof_received = handler.data_received, handler.eof_received  # type: ignore[method-assign]
        self.pause_writing, self.resume_writing = handler.pause_writing, handler.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._strangers.add(transport, transport.close)
        self._handler.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.discard(self._transport)
        self._handler.connection_lost(exc)


async def _body(request: web.Request) -> Any:
    try:
        return read_json(await request.read(), "the body")
    except ValueError as error:
        raise RefusedError(str(error)) from None
    except web.HTTPRequestEntityTooLarge:
        raise RefusedError("the request is larger than environment.agent.max_request_mb allows", status=413) from None


@web.middleware
async def _with_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)
    except RefusedError as refused:
        return web.json_response(refused.body(), status=refused.status)
    except web.HTTPException as error:
        known = "POST /v1/chat/completions, POST /v1/reward and GET /v1/models"
        sentence = f"{request.method} {request.path} is not served here ({error.reason}); there are {known}"
        return web.json_response(RefusedError(sentence, status=error.status).body(), status=error.status)
    except ConnectionError:
        raise
    except Exception:
        echo(traceback.format_exc(), err=True)
        raise
