"""The address that agents call, beside its client in one event loop: where it listens, whom it answers, and what it answers to
those who ask twice or too late.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tepo_megatron.config.reward import EnvironmentConfig
from tepo_megatron.core.problem import ResponseText
from tepo_megatron.runtime.worker_child import WorkerLimits
from tepo_megatron.tasks.environments.agent_session import (
    AgentRequest,
    AgentSession,
    ChatRequest,
    EpisodeError,
    RefusedError,
)
from tepo_megatron.tasks.environments.workers import EnvironmentWorkers
from tests.support.hostile import as_json, broken_json, values
from tests.support.programs import TIMEOUT_S

pytest.importorskip("aiohttp")

from tepo_megatron.tasks.environments.agents import Agents

ENVIRONMENT = EnvironmentConfig(name="a.py:solve", adapter="agent")
SETTINGS = EnvironmentWorkers.agent_setup(ENVIRONMENT, None)
assert SETTINGS is not None
SAMPLING = SETTINGS["sampling"]
ASKED: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "0"}]}

DEEP = b"[" * 3000
bodies = (values.map(as_json) | broken_json).map(lambda text: text.encode("utf-8", "surrogatepass"))

Scene = Callable[[Any, httpx.AsyncClient], Awaitable[None]]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def play(scene: Scene, outside_key: str | None = None) -> None:
    """``client`` asks ``address``, whose root is its base."""

    async def found() -> None:
        agents = Agents(
            None, {}, {"agent": {**SETTINGS, "key": outside_key}}, WorkerLimits.of("", "", ENVIRONMENT.model_dump())
        )
        address = agents.address
        root = (await address.url()).removesuffix("/v1")
        async with httpx.AsyncClient(base_url=root, timeout=TIMEOUT_S, verify=False) as client:
            await asyncio.wait_for(scene(address, client), TIMEOUT_S)

    asyncio.run(found())


def test_it_listens_on_loopback_alone() -> None:
    """On Linux all of 127.0.0.0/8 is this machine: an address for all interfaces would answer there too."""

    async def scene(address: Any, client: httpx.AsyncClient) -> None:
        assert client.base_url.host == "127.0.0.1"
        assert (await client.get("/v1/models", headers=bearer(address.open(talk())))).status_code == 200
        assert client.base_url.port is not None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", client.base_url.port), timeout=10)

    play(scene)


def talk() -> AgentSession:
    return AgentSession("fail", "text")


@pytest.mark.parametrize("outside_key", [None, "outside"])
def test_a_request_without_the_key_of_an_episode_is_answered_nothing(outside_key: str | None) -> None:
    """None, a part of one, that of an episode that is over, that of agents outside; and for these that of an episode."""

    async def scene(address: Any, client: httpx.AsyncClient) -> None:
        under_way, over = talk(), talk()
        key, old = address.open(under_way), address.open(over)
        address.close(old)
        for headers in ({}, {"Authorization": ""}, bearer("no"), bearer(key[:-1]), bearer(old), bearer("outside")):
            for found in (
                await client.post("/v1/chat/completions", json=ASKED, headers=headers),
                await client.post("/v1/reward", json={"reward": 1.0}, headers=headers),
                await client.get("/v1/models", headers=headers),
            ):
                assert found.status_code == 401, headers
                assert found.json()["error"]["code"] == "invalid_api_key"
        assert under_way.posted is over.posted is None
        assert under_way._request is None
        episode = {"problem": {"id": "p"}, "base_url": f"{client.base_url}/v1", "api_key": key, "seed": 3}
        address.offer(episode)
        refused = 404 if outside_key is None else 401
        for headers in ({}, {"Authorization": ""}, bearer("None"), bearer("outsid"), bearer(key)):
            assert (await client.post("/episodes", headers=headers)).status_code == refused
        found = await client.post("/episodes", headers=bearer("outside"))
        if outside_key is None:
            assert found.status_code == refused
        else:
            assert found.json() == episode

    play(scene, outside_key)


def test_a_request_that_is_sent_again_gets_the_answer_of_the_first() -> None:
    """While the model writes, and afterwards, as OpenAI's clients do; the model is asked once."""

    async def scene(address: Any, client: httpx.AsyncClient) -> None:
        one = talk()
        key = address.open(one)

        def ask(again: int) -> Awaitable[httpx.Response]:
            headers = bearer(key) | {"x-stainless-retry-count": str(again)}
            return asyncio.create_task(client.post("/v1/chat/completions", json=ASKED, headers=headers))

        first = ask(0)
        assert isinstance(await one.wait(), ChatRequest)
        second = ask(1)
        while one._turn is None or one._turn.waiting < 2:
            await asyncio.sleep(0.01)
        one.give(ResponseText("b", [11]))
        answers = [(await each).json() for each in (first, second, ask(2))]
        assert answers == [answers[0]] * 3
        assert answers[0]["choices"][0]["message"]["content"] == "b"
        assert one._request is None
        refused = await ask(0)  # not again, but once more: nothing is behind what was said
        assert "it has 1 messages, none of them behind the 2 that were said" in refused.json()["error"]["message"]

    play(scene)


def asked(text: str) -> Any:
    return AgentRequest.read({"messages": [{"role": "user", "content": text}]}, SAMPLING, frozenset())


def test_one_request_at_a_time_is_answered_and_none_after_the_end() -> None:
    async def found() -> None:
        one = talk()
        first = asyncio.create_task(one.ask(asked("0"), again=False))
        await one.wait()
        for text, again in (("0", False), ("1", False), ("1", True)):
            with pytest.raises(RefusedError, match="asks again before it was answered") as refused:
                await one.ask(asked(text), again=again)
            assert refused.value.code == "one_at_a_time"
        first.cancel()  # the client has hung up, and may ask the same once more
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(one.ask(asked("0"), again=False))
        await asyncio.sleep(0)
        one.close()
        for ask in (second, one.ask(asked("0"), again=True), one.ask(asked("1"), again=False)):
            with pytest.raises(RefusedError, match=r"^the episode is over$") as refused:
                await ask
            assert refused.value.code == "episode_over"

        failed = talk()
        failed.refuse("this")
        failed.refuse("that")
        failed.end(1.0)
        with pytest.raises(RefusedError, match=r"^the episode has failed: this$"):
            await failed.ask(asked("0"), again=False)
        with pytest.raises(EpisodeError, match=r"^this$"):
            await failed.wait()

    asyncio.run(asyncio.wait_for(found(), TIMEOUT_S))


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

    play(scene)


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

    play(scene)
