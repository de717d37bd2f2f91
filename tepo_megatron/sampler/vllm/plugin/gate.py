"""A server samples only by weights that it was given: until the first update where a trainer sends them, and from the
moment in which it let its weights go (``/sleep``) until the next one, it refuses every request but those of an update.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tepo_megatron.sampler.vllm.wire.frames import ABORT

DUMMY_FORMAT = "tepo_dummy"
"""vLLM's ``--load-format`` of servers whose first weights the trainer sends (``plugin.dummy``)."""

AWAITS_VARIABLE = "TEPO_AWAITS_WEIGHTS"
"""Environment: set where the weights that a server starts with are not those to sample with."""

_OPENS = "/finish_weight_update"
_CLOSES = "/sleep"

ALLOWED = frozenset(
    {
        *("/health", "/progress", "/metrics", "/version", "/v1/models", "/is_sleeping", "/is_paused"),
        *(ABORT, "/pause", "/resume", _CLOSES, "/wake_up", "/reset_prefix_cache"),
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", _OPENS),
    }
)
"""What needs no weights. All else is refused, so that a route that vLLM may get later samples from none either."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class RequireWeights:
    """ASGI middleware: 409 with a sentence for what would compute with weights that nobody has sent."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._has_weights = not os.environ.get(AWAITS_VARIABLE)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or (path in ALLOWED and path not in (_OPENS, _CLOSES)):
            await self._app(scope, receive, send)
        elif path == _CLOSES:
            self._has_weights = False  # at once: vLLM answers when they have gone
            await self._app(scope, receive, send)
        elif path == _OPENS:
            await self._app(scope, receive, self._opening(send))
        elif self._has_weights:
            await self._app(scope, receive, send)
        else:
            await _refuse(path, send)

    def _opening(self, send: Send) -> Send:
        async def pass_on(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self._has_weights = True
            await send(message)

        return pass_on


async def _refuse(path: str, send: Send) -> None:
    text = (
        f"{path}: this server has no weights yet: it waits for the trainer's (rollout.server.load_format), or let its own go "
        "when it slept, and no weight update has ended since; update its weights first"
    )
    await send({"type": "http.response.start", "status": 409, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps({"error": {"message": text}}).encode()})
