"""Every path of the server but ``/health`` asks for the run's key: vLLM's own check leaves the weight-update routes open."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_VARIABLE = "VLLM_API_KEY"
OPEN_PATHS = frozenset({"/health"})

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class RequireKey:
    """ASGI middleware: 401 unless the request carries ``Authorization: Bearer <key>``.

    The key is read from the environment variable ``VLLM_API_KEY``. Raises RuntimeError at start-up if it is not set.
    """

    def __init__(self, app: App) -> None:
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise RuntimeError(f"the environment variable {KEY_VARIABLE} is not set; this server must not run without a key")
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS or self._authorised(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "this server asks for the key of its run"}'})

    def _authorised(self, scope: Message) -> bool:
        given = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
