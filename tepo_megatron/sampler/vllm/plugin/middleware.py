"""ASGI middleware of a rollout server; ``server.server_program`` names it on vLLM's command line."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tepo_megatron.sampler.vllm.wire import ABORT

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_JSON = ((b"content-type", b"application/json"),)


async def send_answer(send: Send, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = _JSON) -> None:
    await send({"type": "http.response.start", "status": int(status), "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


# -- the key

KEY_VARIABLE = "VLLM_API_KEY"
_OPEN_PATHS = frozenset({"/health"})


class RequireKey:
    """Answers 401 without ``Authorization: Bearer $VLLM_API_KEY``; vLLM's own check leaves the routes of weight updates open.

    Raises RuntimeError at start-up without a key.
    """

    def __init__(self, app: App) -> None:
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise RuntimeError(f"the environment variable {KEY_VARIABLE} is not set; this server must not run without a key")
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in _OPEN_PATHS or self._authorised(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = b'{"error": "this server asks for the key of its run"}'
            await send_answer(send, 401, body, (*_JSON, (b"www-authenticate", b"Bearer")))

    def _authorised(self, scope: Message) -> bool:
        values = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        return len(values) == 1 and hmac.compare_digest(values[0], self._expected)


# -- the wait for weights

DUMMY_FORMAT = "tepo_dummy"
"""vLLM's ``--load-format`` of servers that start without weights (``plugin.engine.DummyWeights``)."""

AWAITS_VARIABLE = "TEPO_AWAITS_WEIGHTS"
"""Environment: set if a server must not sample with the weights that it starts with."""

_OPENS = "/finish_weight_update"
_CLOSES = "/sleep"

ALLOWED = frozenset(
    {
        *("/health", "/progress", "/metrics", "/version", "/v1/models", "/is_sleeping", "/is_paused"),
        *(ABORT, "/pause", "/resume", _CLOSES, "/wake_up", "/reset_prefix_cache"),
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", _OPENS),
    }
)
"""The routes that need no weights. All others are refused, so that a new route of vLLM cannot sample without them."""


class RequireWeights:
    """Answers 409 to requests without the trainer's weights: before a required first update, and from ``/sleep`` until the
    next.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._has_weights = not os.environ.get(AWAITS_VARIABLE)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or (path in ALLOWED and path not in (_OPENS, _CLOSES)):
            await self._app(scope, receive, send)
        elif path == _CLOSES:
            self._has_weights = False  # at once: vLLM answers when they are gone
            await self._app(scope, receive, send)
        elif path == _OPENS:
            await self._app(scope, receive, self._opening(send))
        elif self._has_weights:
            await self._app(scope, receive, send)
        else:
            text = (
                f"{path}: this server has no weights yet: it waits for the trainer's (rollout.server.load_format), or let its "
                "own go when it slept, and no weight update has ended since; update its weights first"
            )
            await send_answer(send, 409, json.dumps({"error": {"message": text}}).encode())

    def _opening(self, send: Send) -> Send:
        async def pass_on(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self._has_weights = True
            await send(message)

        return pass_on


# -- adapters

ADAPTER_NAME = "adapter"

ADAPTER_PATH = "memory:adapter"
"""``plugin.adapters`` recognises this path."""

ADAPTER_VARIABLE = "TEPO_ADAPTERS"
"""Environment: set if the trainer sends adapters alone."""

USE = "/use_adapter"


class UseAdapter:
    """Answers ``POST /use_adapter``: loads the received adapters. vLLM's ``/v1/load_lora_adapter`` would take any folder."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("path") != USE:
            await self._app(scope, receive, send)
            return
        problem = await _load_adapter(scope["app"].state.openai_serving_models)
        body = {"error": {"message": problem}} if problem else {}
        await send_answer(send, 500 if problem else 200, json.dumps(body).encode())


async def _load_adapter(models: Any) -> str:
    """Returns vLLM's error, empty if there is none."""
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

    if ADAPTER_NAME in models.lora_requests:
        return ""
    # Not load_inplace: with it every step of the model would load them again.
    answer = await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=ADAPTER_NAME, lora_path=ADAPTER_PATH))
    return "" if isinstance(answer, str) else str(answer.error.message)


# -- progress

PATH = "/progress"


class Progress:
    """Answers ``GET /progress`` with values that change with every token and request. ``/health`` does not ask the engine, and
    a hanging one looks busy.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("path") != PATH:
            await self._app(scope, receive, send)
            return
        states = scope["app"].state.engine_client.output_processor.request_states
        tokens = sum(state.detokenizer.num_output_tokens() for state in states.values() if state.detokenizer is not None)
        await send_answer(send, 200, json.dumps({"requests": len(states), "tokens": tokens}).encode())


# -- a quiet end


class QuietEnd:
    """Answers nothing; at start-up it makes the engine's client stop in an order that logs no error.

    vLLM 0.32 may log an EngineDeadError at an orderly end. ``tests/unit/sampler/test_quiet_end.py`` fails when it no longer
    does.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            _stop_waiting_first(scope["app"].state.engine_client)
        await self._app(scope, receive, send)


def _stop_waiting_first(engine: Any) -> None:
    close = engine.shutdown

    def shutdown(timeout: float | None = None) -> None:
        waiting = getattr(engine, "output_handler", None)
        if waiting is not None and not waiting.done():
            waiting.get_loop().call_soon_threadsafe(waiting.cancel)
        close(timeout=timeout)

    engine.shutdown = shutdown
