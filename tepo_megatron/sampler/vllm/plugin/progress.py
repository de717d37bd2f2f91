"""The route ``/progress``: whether a server that has not answered yet is at work.

vLLM answers a request when its last token is there, which may take minutes, and ``/health`` does not ask the engine: a server
whose engine or worker hangs looks like one that is busy. What the engine has sent so far does not.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

PATH = "/progress"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Progress:
    """ASGI middleware that answers ``GET /progress`` with the requests that the server holds and the tokens it has of them.

    Both together change whenever a token is made or a request begins or ends.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("path") != PATH:
            await self._app(scope, receive, send)
            return
        states = scope["app"].state.engine_client.output_processor.request_states
        tokens = sum(state.detokenizer.num_output_tokens() for state in states.values() if state.detokenizer is not None)
        body = json.dumps({"requests": len(states), "tokens": tokens}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})
