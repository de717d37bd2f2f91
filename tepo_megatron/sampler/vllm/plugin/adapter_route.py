"""The route ``/use_adapter``: from then on the server knows the adapters that the trainer sends, as a model of their own."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

ADAPTER_NAME = "adapter"
"""What requests call the served model with its adapters."""

ADAPTER_PATH = "memory:adapter"
"""What vLLM is told of where they lie; ``plugin.adapters`` reads it."""

ADAPTER_VARIABLE = "TEPO_ADAPTERS"
"""Environment: set where the trainer sends adapters, and the weights under them stay."""

USE = "/use_adapter"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class UseAdapter:
    """ASGI middleware that answers ``POST /use_adapter``, by what vLLM itself does for ``/v1/load_lora_adapter``: that route
    would take any folder, and this one takes what the workers hold.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("path") != USE:
            await self._app(scope, receive, send)
            return
        problem = await _load(scope["app"].state.openai_serving_models)
        body = {"error": {"message": problem}} if problem else {}
        status = 500 if problem else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def _load(models: Any) -> str:
    """Has the workers load what they hold, if they do not know it yet; returns what was wrong, empty if nothing was."""
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

    if ADAPTER_NAME in models.lora_requests:
        return ""
    # Not load_inplace: with it every step of the model would load them again.
    answer = await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=ADAPTER_NAME, lora_path=ADAPTER_PATH))
    return "" if isinstance(answer, str) else str(answer.error.message)
