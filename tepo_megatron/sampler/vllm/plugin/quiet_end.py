"""A server that is told to end does so without an error in its log.

vLLM 0.32 closes what its API server waits on before it stops the waiting, in another thread: where the loop comes between the
two, it logs an EngineDeadError of an engine that ended in order. ``tests/unit/sampler/test_quiet_end.py`` fails when it does so
no longer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class QuietEnd:
    """ASGI middleware that answers nothing: when the server starts it has the engine's client end in the right order."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            stop_waiting_first(scope["app"].state.engine_client)
        await self._app(scope, receive, send)


def stop_waiting_first(engine: Any) -> None:
    """Has ``engine.shutdown`` cancel the task that waits for the engine's outputs before anything is closed."""
    close = engine.shutdown

    def shutdown(timeout: float | None = None) -> None:
        waiting = getattr(engine, "output_handler", None)
        if waiting is not None and not waiting.done():
            waiting.get_loop().call_soon_threadsafe(waiting.cancel)
        close(timeout=timeout)

    engine.shutdown = shutdown
