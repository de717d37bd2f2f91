import asyncio
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tepo_megatron.sampler.vllm.plugin.middleware import Middleware
from tepo_megatron.sampler.vllm.wire import AWAITS_VARIABLE, KEY_VARIABLE
from tests.support.faulty_server import FaultyServer

KEY_HEADER = (b"authorization", b"Bearer key")


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    made = FaultyServer()
    yield made
    made.close()


@pytest.fixture
def servers(server: FaultyServer) -> Iterator[list[FaultyServer]]:
    """Two, of which the first is ``server``."""
    other = FaultyServer()
    yield [server, other]
    other.close()


@pytest.fixture
def middleware(monkeypatch: pytest.MonkeyPatch) -> Middleware:
    """That of a server with the key "key" and weights of its own, before no application."""
    monkeypatch.setenv(KEY_VARIABLE, "key")
    monkeypatch.delenv(AWAITS_VARIABLE, raising=False)
    return Middleware(cast(Any, None))


def ask(
    app: Any, path: str, body: bytes = b"", *, state: Any = None, headers: Sequence[Any] = (KEY_HEADER,)
) -> tuple[int, bytes]:
    """POSTs ``body`` to an ASGI application in this process; returns the status and the answer.

    ``state`` is the application's, as vLLM's routes read it.
    """
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    app_state = SimpleNamespace(state=state)
    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers), "app": app_state}
    scope |= {"asgi": {"spec_version": "2.4"}}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(message["body"] for message in sent[1:])
