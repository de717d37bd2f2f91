"""The route ``/tepo/samples``: token ids in, drawn responses out, each as it finishes, as arrays (``rollout.frames``).

vLLM's own route for token ids answers when the last of n responses is there, in JSON: ninety bytes a token, and microseconds of
each side's processor. This one makes the same requests of the engine that vLLM makes of n samples, with the same seeds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepo_megatron.sampler.vllm.plugin.adapter_route import ADAPTER_NAME
from tepo_megatron.sampler.vllm.wire.frames import ABORT, SAMPLES, end_frame, error_frame, response_frame

IMPOSSIBLE = -1e30
"""A log-prob below this is −inf, however it is written."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Samples:
    """ASGI middleware that answers the two routes of ``rollout.frames``.

    A request for samples is ``{"id": "…", "model": "…", "prompt": [ids], "sampling": {vLLM's parameters}, "samples":
    [{"sample": 0, "seed": 7, "max_tokens": 64, "prefix": [ids]}], "cache_salt": null, "priority": 0, "sampling_mask": false}``:
    ``prefix`` are tokens drawn before, behind which the sample goes on; requests of different salts share no part of the prefix
    cache; those of a lower priority number are begun before others; a sampling mask needs ``top_k`` among the parameters. One
    to end them is
    ``{"ids": ["…"]}``: what is unfinished is answered as far as it is, with finish reason ``abort``.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._open: dict[str, list[str]] = {}
        """A request's id → the engine's names of its samples."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope.get("path") if scope["type"] == "http" and scope.get("method") == "POST" else None
        if path not in (SAMPLES, ABORT):
            await self._app(scope, receive, send)
            return
        engine = scope["app"].state.engine_client
        try:
            body = json.loads(await _body(receive))
            if path == ABORT:
                await engine.abort([name for wanted in body["ids"] for name in self._open.get(wanted, ())])
                await _answer(send, HTTPStatus.OK, b"{}")
                return
            wanted = _Wanted(body, scope["app"].state)
        except (ValueError, KeyError, TypeError) as error:
            await _answer(send, HTTPStatus.BAD_REQUEST, _error(f"not a request for samples: {error!r}"))
            return
        self._open[wanted.id] = [wanted.name(at) for at in range(len(wanted.samples))]
        try:
            await self._draw(engine, wanted, receive, send)
        finally:
            del self._open[wanted.id]

    async def _draw(self, engine: Any, wanted: _Wanted, receive: Receive, send: Send) -> None:
        tasks = [asyncio.ensure_future(wanted.draw(engine, at)) for at in range(len(wanted.samples))]
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
                raise  # the server ends; otherwise nobody is there to be answered
        except Exception as error:
            status, message = _status(error), f"{error}" or type(error).__name__
            if started:
                await send({"type": "http.response.body", "body": error_frame(message, status)})
            else:
                await _answer(send, status, _error(message))
        finally:
            for task in (watch, *tasks):
                task.cancel()
            await asyncio.gather(watch, *tasks, return_exceptions=True)


class _Wanted:
    """A request for samples of one prompt. Raises KeyError, TypeError or ValueError where it is none."""

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
            "logprobs": self._others,  # beside that of the drawn token
            "flat_logprobs": True,  # lists of numbers instead of an object a token
            "detokenize": bool(body["sampling"].get("stop")),
            "ignore_eos": True,  # what ends a response are its stop_token_ids, also where the server has a tokenizer
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        self._parameters = [
            SamplingParams(**body["sampling"], **fixed, seed=sample["seed"], max_tokens=sample["max_tokens"])
            for sample in self.samples
        ]

    def name(self, at: int) -> str:
        return f"tepo-{self.id}-{at}"

    async def draw(self, engine: Any, at: int) -> bytes:
        """The frame of a sample, when it is finished or ended."""
        from vllm.inputs.engine import tokens_input

        sample = self.samples[at]
        prompt = tokens_input([*self.prompt, *sample.get("prefix", ())], cache_salt=self.cache_salt)
        asked = engine.generate(prompt, self._parameters[at], self.name(at), priority=self.priority, **self._adapter)
        async for output in asked:
            (drawn,) = output.outputs
        versions = [(span.start, span.version) for span in drawn.weight_versions or ()]
        logprobs, kept = split_logprobs(drawn.logprobs.token_ids, drawn.logprobs.logprobs, self._others)
        ids, routes = drawn.token_ids, drawn.routed_experts
        return response_frame(
            sample["sample"], ids, logprobs, drawn.finish_reason, versions, routes, kept if self._others else None
        )


def named_tokens(top_k: int) -> int:
    """How many of the likeliest tokens vLLM is asked for: those that are as likely as the last of ``top_k`` are kept too, and
    logits in bfloat16 are often equal.
    """
    return top_k + 8 + top_k // 8


def split_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[float], others: int
) -> tuple[NDArray[np.float32], tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """The log-probs of the drawn tokens, and which others could have been drawn: counts and ids.

    vLLM gives 1 + ``others`` of each position, those of the drawn token and of the likeliest, among which it may be again; a
    token that could not be drawn has −inf.
    """
    ids = np.asarray(token_ids, np.int32).reshape(-1, 1 + others)
    values = np.asarray(logprobs, np.float32).reshape(ids.shape)
    kept = (values[:, 1:] > IMPOSSIBLE) & (ids[:, 1:] != ids[:, :1])
    return values[:, 0], (kept.sum(1, dtype=np.int32), ids[:, 1:][kept])


async def _body(receive: Receive) -> bytes:
    pieces = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


async def _disconnected(receive: Receive, tasks: Sequence[asyncio.Future[bytes]]) -> None:
    """Ends the samples of a client that is gone: the engine drops them."""
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


async def _answer(send: Send, status: int, content: bytes) -> None:
    await _start(send, status, b"application/json")
    await send({"type": "http.response.body", "body": content})


async def _start(send: Send, status: int, kind: bytes) -> None:
    await send({"type": "http.response.start", "status": int(status), "headers": [(b"content-type", kind)]})
