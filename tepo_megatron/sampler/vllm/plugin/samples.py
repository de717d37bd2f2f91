"""The route ``/tepo/samples``, which answers each response as it finishes; vLLM's own answers all n at the end, in JSON of
ninety bytes a token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepo_megatron.sampler.vllm.plugin.middleware import ADAPTER_NAME, App, Message, Receive, Send, send_answer
from tepo_megatron.sampler.vllm.wire import ABORT, SAMPLES, end_frame, error_frame, response_frame

_IMPOSSIBLE = -1e30


class Samples:
    """ASGI middleware for the routes ``SAMPLES`` and ``ABORT`` of ``vllm.wire``.

    A request for samples is ``{"id": "…", "model": "…", "prompt": [ids], "sampling": {vLLM's parameters}, "samples":
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
                await send_answer(send, HTTPStatus.OK, b"{}")
                return
            request = _SamplesRequest(body, scope["app"].state)
        except (ValueError, KeyError, TypeError) as error:
            await send_answer(send, HTTPStatus.BAD_REQUEST, _error(f"not a request for samples: {error!r}"))
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
                    await _start(send, HTTPStatus.OK, b"application/octet-stream")
                    started = True
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": end_frame(len(tasks))})
        except asyncio.CancelledError:
            if not watch.done():
                raise  # the server ends; otherwise the client has gone
        except Exception as error:
            status, message = _status(error), f"{error}" or type(error).__name__
            if started:
                await send({"type": "http.response.body", "body": error_frame(message, status)})
            else:
                await send_answer(send, status, _error(message))
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
    """The number of likeliest tokens to request of vLLM: more than ``top_k``, since vLLM keeps ties, which bfloat16 makes
    frequent.
    """
    return top_k + 8 + top_k // 8


def split_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[float], others: int
) -> tuple[NDArray[np.float32], tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """The log-probs of the drawn tokens, and the counts and ids of a sampling mask.

    vLLM gives 1 + ``others`` values for each position: the drawn token's, and the likeliest ones, maybe with the drawn again;
    −inf for an impossible token.
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


async def _start(send: Send, status: int, kind: bytes) -> None:
    await send({"type": "http.response.start", "status": int(status), "headers": [(b"content-type", kind)]})
