"""A server on loopback with the OpenAI protocol, which agents call as the model."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tepo_megatron.tasks.environments.agents.agent_session import AgentSession
from tepo_megatron.tasks.environments.agents.chat_requests import RefusedError, chunks, read_request

HOST = "127.0.0.1"
_FOLLOWS = {"Cache-Control": "no-cache", "Content-Type": "text/event-stream"}
_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True)
class _Offer:
    problem: Mapping[str, Any]
    key: str
    seed: int


class ChatAddress:
    """``POST /v1/chat/completions`` and ``/v1/reward``, ``GET /v1/models``; for external agents ``POST /episodes``. A
    request's key identifies its episode. ``outside_key`` None: no external agents. Used from one event loop.
    """

    def __init__(
        self,
        sampling: Mapping[str, Any],
        ignored: frozenset[str],
        *,
        port: int,
        max_request_bytes: int,
        outside_key: str | None = None,
    ) -> None:
        self._sampling, self._ignored, self._port, self._outside_key = sampling, ignored, port, outside_key
        self._max_request_bytes = max_request_bytes
        self._talks: dict[str, AgentSession] = {}
        self._offers: asyncio.Queue[_Offer] = asyncio.Queue()
        self._starting: asyncio.Task[str] | None = None

    async def url(self) -> str:
        """Ends with ``/v1``; listens from the first call on. Raises OSError if the port is not available."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    def open(self, talk: AgentSession) -> str:
        """Returns the key of the episode's requests."""
        key = f"tepo-{secrets.token_urlsafe(24)}"
        self._talks[key] = talk
        return key

    def close(self, key: str) -> None:
        self._talks.pop(key, None)

    def offer(self, problem: Mapping[str, Any], key: str, seed: int) -> None:
        self._offers.put_nowait(_Offer(problem, key, seed))

    # -- private -----------------------------------------------------------------------------------------------------------

    async def _start(self) -> str:
        app = web.Application(client_max_size=self._max_request_bytes, middlewares=[_with_errors])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/reward", self._reward),
                web.get("/v1/models", self._models),
                web.post("/episodes", self._episode),
            ]
        )
        # A client that disconnects may ask the same once more.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, HOST, self._port)
        try:
            await site.start()
        except OSError as error:
            raise OSError(
                f"environment.agent.port = {self._port} cannot be listened on ({error.strerror or error}); give another, or 0"
            ) from error
        port = runner.addresses[0][1]
        return f"http://{HOST}:{port}/v1"

    def _talk(self, request: web.Request) -> AgentSession:
        key = _key_of(request)
        talk = self._talks.get(key)
        if talk is None:
            raise RefusedError(
                "no episode has this API key: it is over, or the agent does not send the key that it was given",
                status=401,
                code="invalid_api_key",
            )
        return talk

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        talk = self._talk(request)
        again = request.headers.get("x-stainless-retry-count", "0") != "0"  # OpenAI's clients count
        try:
            asked = read_request(await _body(request), self._sampling, self._ignored)
            answer = await talk.ask(asked, again=again)
        except RefusedError as refused:
            if refused.code != "episode_over":
                talk.refuse(str(refused))
            raise
        if not asked.stream:
            return web.json_response(answer)
        response = web.StreamResponse(headers=_FOLLOWS)
        await response.prepare(request)
        for chunk in chunks(answer, usage=asked.usage_in_stream):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _reward(self, request: web.Request) -> web.Response:
        talk = self._talk(request)
        try:
            body = await _body(request)
            if not isinstance(body, dict) or body.get("reward") is None:
                raise RefusedError('a reward is sent as {"reward": 1.0}, or with components by name', param="reward")
        except RefusedError as refused:
            talk.refuse(str(refused))
            raise
        talk.post(body["reward"])
        return web.json_response({"reward": body["reward"]})

    async def _models(self, request: web.Request) -> web.Response:
        self._talk(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "tepo_megatron"}
        return web.json_response({"object": "list", "data": [model]})

    async def _episode(self, request: web.Request) -> web.Response:
        key = self._outside_key
        if key is None:
            raise RefusedError("this run has no agents outside (environment.name = outside)", status=404)
        if not hmac.compare_digest(_key_of(request).encode(), key.encode()):
            raise RefusedError("another key than that of environment.agent.key_file", status=401, code="invalid_api_key")
        try:
            async with asyncio.timeout(_LONGEST_WAIT_S):
                offer = await self._offers.get()
                while offer.key not in self._talks:  # the episode ended before it was fetched
                    offer = await self._offers.get()
        except TimeoutError:
            return web.Response(status=204)
        return web.json_response(
            {"problem": offer.problem, "base_url": await self.url(), "api_key": offer.key, "seed": offer.seed}
        )


def _key_of(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ").strip()


async def _body(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except ValueError:
        raise RefusedError("the body is not JSON") from None
    except web.HTTPRequestEntityTooLarge:
        raise RefusedError("the request is larger than environment.agent.max_request_mb allows", status=413) from None


@web.middleware
async def _with_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Errors in the format of OpenAI's clients."""
    try:
        return await handler(request)
    except RefusedError as refused:
        return web.json_response(refused.body(), status=refused.status)
    except web.HTTPException as error:
        known = "POST /v1/chat/completions, POST /v1/reward and GET /v1/models"
        sentence = f"{request.method} {request.path} is not served here ({error.reason}); there are {known}"
        return web.json_response(RefusedError(sentence, status=error.status).body(), status=error.status)
