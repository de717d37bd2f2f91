"""ASGI middleware on vLLM's command line (``Server.command``): the run's key, the wait for weights, our routes."""

from __future__ import annotations

import asyncio
import hmac
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from http import HTTPStatus
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from tepo_megatron.sampler.vllm import wire

_HEALTH, _OPENS, _CLOSES = "/health", "/finish_weight_update", "/sleep"
_UPDATES, _UPDATED = ("/init_weight_transfer_engine", "/pause"), "/resume"

ALLOWED = frozenset(
    {
        *(_HEALTH, wire.PROGRESS, wire.FACTS, "/metrics", "/version", "/v1/models", "/is_sleeping", "/is_paused"),
        *(wire.ABORT, "/pause", "/resume", _CLOSES, "/wake_up", "/reset_prefix_cache"),
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", _OPENS),
    }
)
"""A new route of vLLM must not sample without weights."""

_IMPOSSIBLE = -1e30


class Middleware:
    """Answers 401 without ``Authorization: Bearer $VLLM_API_KEY``, since vLLM's own check leaves weight-update routes open, and
    409 before a required first weight update, and from ``/sleep`` until the next.

    A request for samples is ``{"id": "…", "model": "…", "prompt": [ids], "sampling": {vLLM's parameters}, "samples":
    [{"sample": 0, "seed": 7, "max_tokens": 64, "prefix": [ids]}], "cache_salt": null, "priority": 0, "sampling_mask": false}``;
    one to abort is ``{"ids": ["…"]}``. Different salts share no prefix cache; a lower priority starts first. Raises
    RuntimeError at start-up without a key.
    """

    def __init__(self, app: ASGIApp) -> None:
        key = os.environ.get(wire.KEY_VARIABLE)
        if not key:
            raise RuntimeError(f"the environment has no {wire.KEY_VARIABLE}; this server must not run without a key")
        self._app = app
        self._expected = f"Bearer {key}".encode()
        self._has_weights = not os.environ.get(wire.AWAITS_VARIABLE)
        self._is_updating = False
        self._open: dict[str, list[str]] = {}  # request id → the engine's names of its samples
        self._routes = {wire.SAMPLES: self._draw, wire.ABORT: self._abort, wire.PROGRESS: self._progress, wire.FACTS: _facts}
        self._routes |= {wire.USE_ADAPTER: _use_adapter, wire.READ_BACK: _read_back}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            _stop_waiting_first(scope["app"].state.engine_client)
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        answer: ASGIApp = self._app
        if path != _HEALTH and not self._is_authorised(scope):
            refusal = {"error": "this server asks for the key of its run"}
            answer = JSONResponse(refusal, HTTPStatus.UNAUTHORIZED, {"www-authenticate": "Bearer"})
            if scope["type"] == "websocket":
                answer = WebSocketClose(1008)
        elif path == _CLOSES:
            self._has_weights = False  # at once: vLLM answers when they are gone
        elif path in _UPDATES:
            self._is_updating = True
        elif path == _UPDATED:
            send = _when_ok(send, self._note_updated)
        elif path == _OPENS:
            send = _when_ok(send, self._note_weights)
        elif scope["type"] == "http" and path not in ALLOWED and not self._has_weights:
            answer = _error(
                HTTPStatus.CONFLICT,
                f"{path}: this server has no weights yet: it waits for the trainer's (rollout.server.load_format), or let its "
                "own go when it slept, and no weight update has ended since; update its weights first",
            )
        elif scope["type"] == "http" and path in self._routes:
            answer = await self._routes[path](Request(scope, receive))
        await answer(scope, receive, send)

    def _is_authorised(self, scope: Scope) -> bool:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(values) == 1 and hmac.compare_digest(values[0], self._expected)

    def _note_weights(self) -> None:
        self._has_weights = True

    def _note_updated(self) -> None:
        self._is_updating = False

    async def _progress(self, request: Request) -> Response:
        requests = request.app.state.engine_client.output_processor.request_states
        tokens = sum(state.detokenizer.num_output_tokens() for state in requests.values() if state.detokenizer is not None)
        return JSONResponse({"requests": len(requests), "tokens": tokens, "updating": self._is_updating})

    async def _abort(self, request: Request) -> Response:
        ids = (await request.json())["ids"]
        await request.app.state.engine_client.abort([name for one in ids for name in self._open.get(one, ())])
        return JSONResponse({})

    async def _draw(self, request: Request) -> Response:
        try:
            samples = _Samples(await request.json(), request.app.state)
        except (ValueError, KeyError, TypeError) as error:
            return _error(HTTPStatus.BAD_REQUEST, f"not a request for samples: {error!r}")
        return StreamingResponse(self._frames(samples), media_type="application/octet-stream")

    async def _frames(self, samples: _Samples) -> AsyncIterator[bytes]:
        self._open[samples.id] = samples.names
        tasks = [asyncio.ensure_future(samples.draw(index)) for index in range(len(samples.names))]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
            yield wire.head_frame({"end": len(tasks)})
        except Exception as error:
            yield wire.head_frame({"error": str(error) or type(error).__name__, "status": _status(error)})
        finally:  # also if the client has closed
            del self._open[samples.id]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _when_ok(send: Send, act: Callable[[], None]) -> Send:
    async def pass_on(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == HTTPStatus.OK:
            act()
        await send(message)

    return pass_on


class _Samples:
    def __init__(self, body: Any, state: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._engine = state.engine_client
        self.id, self._prompt, self._samples = str(body["id"]), list(body["prompt"]), list(body["samples"])
        self.names = [f"tepo-{self.id}-{index}" for index in range(len(self._samples))]
        self._options: dict[str, Any] = {"priority": int(body.get("priority", 0))}
        # The adapters that the trainer sends are a model of their own, which vLLM knows by this name.
        if body.get("model") == wire.ADAPTER_NAME:
            self._options["lora_request"] = state.openai_serving_models.lora_requests[wire.ADAPTER_NAME]
        self._cache_salt, self._counts_cached = body.get("cache_salt"), bool(body.get("count_cached"))
        self._others = 0
        if body.get("sampling_mask"):
            self._others = min(wire.named_tokens(body["sampling"]["top_k"]), self._engine.model_config.get_vocab_size())
        fixed = {
            "logprobs": self._others,  # besides that of the drawn token
            "flat_logprobs": True,  # lists of numbers instead of an object a token
            "detokenize": bool(body["sampling"].get("stop")),
            "skip_special_tokens": False,  # a stop string may be one
            "ignore_eos": True,  # stop_token_ids end a response, even if the server has a tokenizer
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        self._parameters = [
            SamplingParams(**body["sampling"], **fixed, seed=sample["seed"], max_tokens=sample["max_tokens"])
            for sample in self._samples
        ]

    async def draw(self, index: int) -> bytes:
        from vllm.inputs.engine import tokens_input

        sample = self._samples[index]
        prompt = tokens_input([*self._prompt, *sample.get("prefix", ())], cache_salt=self._cache_salt)
        async for output in self._engine.generate(prompt, self._parameters[index], self.names[index], **self._options):
            (drawn,) = output.outputs
        versions = [(span.start, span.version) for span in drawn.weight_versions or ()]
        logprobs, mask = _split_logprobs(drawn.logprobs.token_ids, drawn.logprobs.logprobs, self._others)
        result = (drawn.token_ids, logprobs, drawn.finish_reason, versions, drawn.routed_experts)
        cached = output.num_cached_tokens if self._counts_cached else None
        return wire.response_frame(sample["sample"], *result, mask if self._others else None, cached)


def _split_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[float], others: int
) -> tuple[NDArray[np.float32], tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """Returns the drawn tokens' log-probs, and a sampling mask's counts and ids.

    vLLM gives 1 + ``others`` values per position: the drawn token's and the likeliest, which may include it.
    """
    ids = np.asarray(token_ids, np.int32).reshape(-1, 1 + others)
    values = np.asarray(logprobs, np.float32).reshape(ids.shape)
    possible = (values[:, 1:] > _IMPOSSIBLE) & (ids[:, 1:] != ids[:, :1])
    return values[:, 0], (possible.sum(1, dtype=np.int32), ids[:, 1:][possible])


def _status(error: Exception) -> int:
    from vllm.exceptions import VLLMClientError

    if (status := getattr(error, "http_status", None)) is not None:
        return int(status)
    return int(HTTPStatus.BAD_REQUEST if isinstance(error, VLLMClientError | ValueError) else HTTPStatus.INTERNAL_SERVER_ERROR)


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status)


async def _facts(request: Request) -> Response:
    engine = request.app.state.engine_client
    attention = re.findall(r"Attention\w*\(.*backend=(\w+)", "\n".join(await engine.collective_rpc("get_model_inspection")))
    runner = f"Model Runner V{1 + engine.vllm_config.use_v2_model_runner}"
    return JSONResponse({"facts": ", ".join([runner, *sorted(set(attention))])})


async def _read_back(request: Request) -> Response:
    workers = await request.app.state.engine_client.collective_rpc("tepo_read_back")
    changed = [f"{name} in worker {number}" for number, (names, _) in enumerate(workers) for name in names]
    return JSONResponse({"changed": changed, "share": min(share for _, share in workers)})


async def _use_adapter(request: Request) -> Response:
    """vLLM's ``/v1/load_lora_adapter`` takes any folder."""
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

    models = request.app.state.openai_serving_models
    if wire.ADAPTER_NAME not in models.lora_requests:
        # Not load_inplace: with it every step of the model would load them again.
        adapter = LoadLoRAAdapterRequest(lora_name=wire.ADAPTER_NAME, lora_path=wire.ADAPTER_PATH)
        answer = await models.load_lora_adapter(adapter)
        if not isinstance(answer, str):
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR, str(answer.error.message))
    return JSONResponse({})


def _stop_waiting_first(engine: Any) -> None:
    """vLLM 0.32 may log an EngineDeadError at an orderly end (``test_middleware.py``)."""
    close = engine.shutdown

    def shutdown(timeout: float | None = None) -> None:
        waiting = getattr(engine, "output_handler", None)
        if waiting is not None and not waiting.done():
            waiting.get_loop().call_soon_threadsafe(waiting.cancel)
        close(timeout=timeout)

    engine.shutdown = shutdown
