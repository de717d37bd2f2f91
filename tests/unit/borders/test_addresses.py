"""The addresses of ``tepo environment serve`` and of agents: who has no key is answered without being read, nobody takes all
connections, and a body that is no request is refused with a sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tepo_megatron.config.reward import EnvironmentConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.environments.agent_session import AgentSession, EpisodeError
from tepo_megatron.tasks.environments.protocol import EpisodeAnswer, read_key
from tepo_megatron.tasks.environments.service import EnvironmentService, RemoteEnvironments
from tests.support.hostile import as_json, broken_json, values
from tests.support.programs import TIMEOUT_S
from tests.unit.environments.test_chat_address import bearer, play

LARGEST = 60 * 2**20
DEEP = b"[" * 3000
ENVIRONMENT = {"name": "guess_number", "timeout_s": 600.0}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "key"
    read_key(path, write=True)
    return path


@pytest.fixture(scope="module")
def service(key_file: Path) -> Iterator[EnvironmentService]:
    config = EnvironmentConfig.model_validate(ENVIRONMENT)
    service = EnvironmentService(config, host="127.0.0.1", port=0, key=key_file.read_text())
    thread = threading.Thread(target=service.serve)
    thread.start()
    yield service
    service.stop()
    thread.join()


def play_an_episode(service: EnvironmentService, key_file: Path) -> None:
    host = RemoteEnvironments(EnvironmentConfig.model_validate({**ENVIRONMENT, "servers": [service.url], "key_file": key_file}))
    try:
        host.call(0, ["reset", Problem("p", "", "7").to_json(), 0, False])
        answers: list[EpisodeAnswer] = []
        while not answers:
            answers += host.poll(1.0)
        assert answers[0].error is answers[0].lost is None
    finally:
        host.close()


def connect(url: str) -> socket.socket:
    address = httpx.URL(url)
    assert address.port is not None
    return socket.create_connection((address.host, address.port), timeout=TIMEOUT_S)


def head(path: str, length: int | str, key: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {length}\r\n\r\n".encode()


def status(connection: socket.socket) -> int:
    """Reads to the end of the connection."""
    return int(b"".join(iter(lambda: connection.recv(4096), b"")).split()[1])


@pytest.mark.parametrize("path", ["/sessions", "/sessions/any/calls", "/"])
def test_the_key_comes_before_the_body(path: str, service: EnvironmentService, key_file: Path) -> None:
    with connect(service.url) as stranger:
        stranger.sendall(head(path, LARGEST))
        assert status(stranger) == 401
    play_an_episode(service, key_file)


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "1_0", str(2**40), "x"])
def test_a_length_that_is_none_is_refused(length: str, service: EnvironmentService, key_file: Path) -> None:
    with connect(service.url) as trainer:
        trainer.sendall(head("/sessions", length, key_file.read_text()))
        assert status(trainer) == 413


def test_connections_without_a_key_do_not_add_up(service: EnvironmentService, key_file: Path) -> None:
    """The oldest ones are closed, each has a thread until then; a trainer that comes later is served."""
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connect(service.url)) for _ in range(300)]
        assert strangers[0].recv(1) == b""
        play_an_episode(service, key_file)
        assert threading.active_count() - before < 150


@pytest.fixture(scope="module")
def trainer(service: EnvironmentService, key_file: Path) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, headers=bearer(key_file.read_text()), timeout=TIMEOUT_S, verify=False) as client:
        yield client


def open_session(trainer: httpx.Client) -> str:
    described = {"name": "guess_number", "adapter": "none", "kwargs": {}}
    return trainer.post("/sessions", json={"environment": described}).json()["session"]


bodies = (values.map(as_json) | broken_json).map(lambda text: text.encode("utf-8", "surrogatepass"))


@given(body=bodies)
@example(body=DEEP)
@example(body=b'{"a":' * 3000)
@example(body=b"[" * 500 + b"]" * 500)
@settings(max_examples=40, deadline=None)
def test_any_body_is_answered(body: bytes, trainer: httpx.Client) -> None:
    session = open_session(trainer)
    for path in ("/sessions", f"/sessions/{session}/calls", f"/sessions/{session}/answers"):
        assert trainer.post(path, content=body).status_code in (200, 400, 409)


@pytest.mark.parametrize("wait_s", ["x", None, [], -1, math.nan, math.inf, "1e400", 10**400])
def test_a_wait_that_is_none_is_refused(wait_s: Any, trainer: httpx.Client) -> None:
    reply = trainer.post(f"/sessions/{open_session(trainer)}/answers", content=json.dumps({"wait_s": wait_s}))
    assert reply.status_code == 400
    assert reply.json()["error"]


# -- agents --------------------------------------------------------------------------------------------------------------


@given(body=bodies, path=st.sampled_from(["/v1/chat/completions", "/v1/reward"]))
@example(body=DEEP, path="/v1/reward")
@example(body=DEEP, path="/v1/chat/completions")
@example(body=b'{"reward":' + b"[" * 500 + b"]" * 500 + b"}", path="/v1/reward")
@settings(max_examples=40, deadline=None)
def test_an_agents_request_that_is_none_fails_its_episode(body: bytes, path: str) -> None:
    async def scene(address: Any, client: httpx.AsyncClient) -> None:
        session = AgentSession("fail", "text")
        request = asyncio.create_task(client.post(path, content=body, headers=bearer(address.open(session))))
        waits = asyncio.create_task(session.wait())
        await asyncio.wait([request, waits], return_when=asyncio.FIRST_COMPLETED)
        if request.done() and request.result().status_code != 200:
            assert request.result().json()["error"]["message"]
            with pytest.raises(EpisodeError):
                await waits
        session.close()
        waits.cancel()
        await asyncio.gather(request, waits, return_exceptions=True)

    play(scene, most=10**6)


def test_an_agent_is_served_beside_connections_without_a_key() -> None:
    async def scene(address: Any, client: httpx.AsyncClient) -> None:
        port = client.base_url.port
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
        assert await strangers[0][0].read(1) == b""
        key = address.open(AgentSession("fail", "text"))
        assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
        open_connections = sum(not reader.at_eof() for reader, _ in strangers)
        assert open_connections < 150
        for _, writer in strangers:
            writer.close()

    play(scene, most=10**6)
