"""ASGI middleware, which ``Server.command`` names on vLLM's command line."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepo_megatron.sampler.vllm.wire import ABORT, SAMPLES, head_frame, response_frame

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_JSON = ((b"content-type", b"application/json"),)


async def _send_answer(send: Send, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = _JSON) -> None:
    await send({"type": "http.response.start", "status": int(status), "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


# -- the key

KEY_VARIABLE = "VLLM_API_KEY"
_OPEN_PATHS = frozenset({"/health"})


class RequireKey:
    """Answers 401 without ``Authorization: Bearer $VLLM_API_KEY``: vLLM's own check leaves the weight-update routes open.

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
            await _send_answer(send, 401, body, (*_JSON, (b"www-authenticate", b"Bearer")))

    def _authorised(self, scope: Message) -> bool:
        values = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        return len(values) == 1 and hmac.compare_digest(values[0], self._expected)


# -- the wait for weights

DUMMY_FORMAT = "tepo_dummy"  # vLLM's --load-format of servers without weights

AWAITS_VARIABLE = "TEPO_AWAITS_WEIGHTS"
"""Set if the server's first weights must not sample."""

_OPENS = "/finish_weight_update"
_CLOSES = "/sleep"

ALLOWED = frozenset(
    {
        *("/health", "/progress", "/metrics", "/version", "/v1/models", "/is_sleeping", "/is_paused"),
        *(ABORT, "/pause", "/resume", _CLOSES, "/wake_up", "/reset_prefix_cache"),
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", _OPENS),
    }
)
"""A new route of vLLM must not sample without weights."""


class RequireWeights:
    """Answers 409 before a required first update, and from ``/sleep`` until the next."""

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
            await _send_answer(send, 409, json.dumps({"error": {"message": text}}).encode())

    def _opening(self, send: Send) -> Send:
        async def pass_on(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self._has_weights = True
            await send(message)

        return pass_on


# -- adapters

ADAPTER_NAME = "adapter"

ADAPTER_PATH = "memory:adapter"  # plugin.patches recognises it

ADAPTER_VARIABLE = "TEPO_ADAPTERS"
"""Set if the trainer sends adapters alone."""

USE_ADAPTER = "/use_adapter"


class _Route:
    path: str

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope.get("path") == self.path:
            status, body = await self._answer(scope["app"].state)
            await _send_answer(send, status, json.dumps(body).encode())
        else:
            await self._app(scope, receive, send)

    async def _answer(self, state: Any) -> tuple[int, Any]:
        raise NotImplementedError


class UseAdapter(_Route):
    """vLLM's ``/v1/load_lora_adapter`` would take any folder."""

    path = USE_ADAPTER

    async def _answer(self, state: Any) -> tuple[int, Any]:
        problem = await _load_adapter(state.openai_serving_models)
        return (500, {"error": {"message": problem}}) if problem else (200, {})


async def _load_adapter(models: Any) -> str:
    """Returns vLLM's error."""
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

    if ADAPTER_NAME in models.lora_requests:
        return ""
    # Not load_inplace: with it every step of the model would load them again.
    answer = await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=ADAPTER_NAME, lora_path=ADAPTER_PATH))
    return "" if isinstance(answer, str) else str(answer.error.message)


# -- progress

PROGRESS = "/progress"


class Progress(_Route):
    """Values change with every token and request: ``/health`` does not ask the engine."""

    path = PROGRESS

    async def _answer(self, state: Any) -> tuple[int, Any]:
        requests = state.engine_client.output_processor.request_states
        tokens = sum(state.detokenizer.num_output_tokens() for state in requests.values() if state.detokenizer is not None)
        return 200, {"requests": len(requests), "tokens": tokens}


# -- a quiet end


class QuietEnd:
    """vLLM 0.32 may log an EngineDeadError at an orderly end (``tests/unit/sampler/test_quiet_end.py``)."""

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


_IMPOSSIBLE = -1e30


class Samples:
    """A request for samples is ``{"id": "…", "model": "…", "prompt": [ids], "sampling": {vLLM's parameters}, "samples":
    [{"sample": 0, "seed": 7, "max_tokens": 64, "prefix": [ids]}], "cache_salt": null, "priority": 0, "sampling_mask": false}``;
    one to abort is ``{"ids": ["…"]}``. Different salts share no prefix cache; a lower priority starts first.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._open: dict[str, list[str]] = {}
        """Request id → the engine's names of its samples."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope.get("path") if scope["type"] == "http" and scope.get("method") == "POST" else None
        if path not in (SAMPLES, ABORT):
            await self._app(scope, receive, send)
            return
        engine = scope["app"].state.engine_client
        try:
            body = json.loads(await _body(receive))
            if path == ABORT:
                await engine.abort([name for request_id in body["ids"] for name in self._open.get(request_id, ())])
                await _send_answer(send, HTTPStatus.OK, b"{}")
                return
            request = _SamplesRequest(body, scope["app"].state)
        except (ValueError, KeyError, TypeError) as error:
            await _send_answer(send, HTTPStatus.BAD_REQUEST, _error(f"not a request for samples: {error!r}"))
            return
        self._open[request.id] = [request.name(index) for index in range(len(request.samples))]
        try:
            await self._draw(engine, request, receive, send)
        finally:
            del self._open[request.id]

    async def _draw(self, engine: Any, request: _SamplesRequest, receive: Receive, send: Send) -> None:
        tasks = [asyncio.ensure_future(request.draw(engine, index)) for index in range(len(request.samples))]
        watch = asyncio.ensure_future(_disconnected(receive, tasks))
        started = False
        try:
            for done in asyncio.as_completed(tasks):
                frame = await done
                if not started:
                    headers = [(b"content-type", b"application/octet-stream")]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    started = True
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": head_frame({"end": len(tasks)})})
        except asyncio.CancelledError:
            if not watch.done():
                raise  # the server ends; otherwise the client has closed
        except Exception as error:
            status, message = _status(error), f"{error}" or type(error).__name__
            if started:
                await send({"type": "http.response.body", "body": head_frame({"error": message, "status": status})})
            else:
                await _send_answer(send, status, _error(message))
        finally:
            for task in (watch, *tasks):
                task.cancel()
            await asyncio.gather(watch, *tasks, return_exceptions=True)


class _SamplesRequest:
    def __init__(self, body: Any, state: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # The adapters that the trainer sends are a model of their own, which vLLM knows by this name.
        adapted = body.get("model") == ADAPTER_NAME
        self._adapter = {"lora_request": state.openai_serving_models.lora_requests[ADAPTER_NAME]} if adapted else {}
        self.id, self.prompt, self.samples = str(body["id"]), list(body["prompt"]), list(body["samples"])
        self.cache_salt, self.priority = body.get("cache_salt"), int(body.get("priority", 0))
        self._others = 0
        if body.get("sampling_mask"):
            size = state.engine_client.model_config.get_vocab_size()
            self._others = min(named_tokens(body["sampling"]["top_k"]), size)
        fixed = {
            "logprobs": self._others,  # besides that of the drawn token
            "flat_logprobs": True,  # lists of numbers instead of an object a token
            "detokenize": bool(body["sampling"].get("stop")),
            "ignore_eos": True,  # stop_token_ids end a response, even if the server has a tokenizer
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        self._parameters = [
            SamplingParams(**body["sampling"], **fixed, seed=sample["seed"], max_tokens=sample["max_tokens"])
            for sample in self.samples
        ]

    def name(self, index: int) -> str:
        return f"tepo-{self.id}-{index}"

    async def draw(self, engine: Any, index: int) -> bytes:
        from vllm.inputs.engine import tokens_input

        sample = self.samples[index]
        prompt = tokens_input([*self.prompt, *sample.get("prefix", ())], cache_salt=self.cache_salt)
        outputs = engine.generate(prompt, self._parameters[index], self.name(index), priority=self.priority, **self._adapter)
        async for output in outputs:
            (drawn,) = output.outputs
        versions = [(span.start, span.version) for span in drawn.weight_versions or ()]
        logprobs, kept = split_logprobs(drawn.logprobs.token_ids, drawn.logprobs.logprobs, self._others)
        ids, routes = drawn.token_ids, drawn.routed_experts
        return response_frame(
            sample["sample"], ids, logprobs, drawn.finish_reason, versions, routes, kept if self._others else None
        )


def named_tokens(top_k: int) -> int:
    """vLLM keeps ties, which are frequent in bfloat16."""
    return top_k + 8 + top_k // 8


def split_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[float], others: int
) -> tuple[NDArray[np.float32], tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """Returns the drawn tokens' log-probs, and a sampling mask's counts and ids.

    vLLM gives 1 + ``others`` values per position: the drawn token's, and the likeliest, maybe with the drawn again.
    """
    ids = np.asarray(token_ids, np.int32).reshape(-1, 1 + others)
    values = np.asarray(logprobs, np.float32).reshape(ids.shape)
    kept = (values[:, 1:] > _IMPOSSIBLE) & (ids[:, 1:] != ids[:, :1])
    return values[:, 0], (kept.sum(1, dtype=np.int32), ids[:, 1:][kept])


async def _body(receive: Receive) -> bytes:
    pieces = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


async def _disconnected(receive: Receive, tasks: Sequence[asyncio.Future[bytes]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    for task in tasks:
        task.cancel()


def _status(error: Exception) -> int:
    from vllm.exceptions import VLLMClientError

    if (status := getattr(error, "http_status", None)) is not None:
        return int(status)
    return int(HTTPStatus.BAD_REQUEST if isinstance(error, VLLMClientError | ValueError) else HTTPStatus.INTERNAL_SERVER_ERROR)


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()
