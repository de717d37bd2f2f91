"""Agents on the real OpenAI client in worker processes: what they say is read, and whatever they do is their own episode's. The
address that they call: where it listens, whom it answers, and what it answers to those who ask twice or too late.
"""

import asyncio
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.request import proxy_bypass

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.config.reward import EnvironmentConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Response
from tepo_megatron.runtime import worker_process
from tepo_megatron.runtime.worker_child import WorkerLimits
from tepo_megatron.sampler.vllm.resources import reserve_port
from tepo_megatron.tasks.environments.agent_session import AgentRequest, AgentSession, ChatRequest, EpisodeError, RefusedError
from tepo_megatron.tasks.environments.environment_task import EnvironmentTask
from tepo_megatron.tasks.environments.episodes import opening_of
from tepo_megatron.tasks.environments.worker import EpisodeTable
from tepo_megatron.tasks.environments.workers import EnvironmentWorkers
from tepo_megatron.tasks.protocol import RewardResult
from tests.support import episodes
from tests.support.episodes import VOCABULARY, FakeSamples, Letters
from tests.support.hostile import DEEP, bodies
from tests.support.programs import TIMEOUT_S

pytest.importorskip("openai")
pytest.importorskip("aiohttp")

from tepo_megatron.tasks.environments import agents

AGENTS = f"{Path(__file__).parents[2] / 'support' / 'odd_agents.py'}"

FAILS = {
    "asks nothing": "the agent ended without asking the model anything",
    "raises": r"the agent raised KeyError: 'gone', at .*odd_agents.py:\d+: \"raise KeyError",
    "exits": "the agent raised SystemExit: 3",
    "another temperature": "temperature = 0.5, and the run draws with rollout.sampling.temperature = 1.0",
    "edits": r"another history than what was said: message 0 \(user\) was '0' and is '3'; an episode is trained on as one",
    "unknown text": "the environment's observation has characters that the tokenizer does not know: 'é'",
    "too large": "the request is larger than environment.agent.max_request_mb allows",
    "returns nothing": "the agent returned nothing, and no reward; return a number, send one to /v1/reward, or set",
    "returns text": "the agent returned text, and no reward",
    "posts text": "the environment returned str, not a number",
    "posts too much": r"the environment returned 1e\+39, beyond ±1e\+15",
    "posts nothing": r"a reward is sent as {\"reward\": 1.0}, or with components by name",
}
"""What an agent does → what is said of its episode."""

REWARDS = {"fine": 1.0, "the run's own": 1.0, "posts": 0.25, "never ends": 0.0}

TAKEN = dict.fromkeys(("another temperature", "a seed", "forgets", "edits", "returns nothing"), 1.0)
TAKEN |= {"returns text": 0.5, "posts": 0.25, "posts and says": 0.75}
"""With settings that ignore, restart and rate."""


def config(solve: str = "solve", agent: dict[str, Any] | None = None, **more: Any) -> RunConfig:
    common = {"name": f"{AGENTS}:{solve}", "adapter": "agent", "timeout_s": 600.0, "max_turns": 5}
    settings = {"chat_template": False, "max_request_mb": 1, **(agent or {})}
    return RunConfig.model_validate({"environment": {**common, "agent": settings, **more}})


def opened(found: RunConfig) -> EnvironmentTask:
    return EnvironmentTask(found, Letters(), VOCABULARY, 120)  # type: ignore[arg-type]


def play(pool: EnvironmentTask, does: list[str], prompt: str = "") -> list[tuple[Response, RewardResult, FakeSamples]]:
    problems = [Problem(what, prompt, what) for what in does]
    samples: Any = FakeSamples(random.Random(0))
    with pool.stream(samples, lambda at: problems[at]) as stream:
        for at in range(len(problems)):
            stream.submit(at, (1,), 7 * at + 1)
        found = episodes.play(stream)
    responses = [found[at, 0] for at in range(len(problems))]
    texts = [ResponseText("", response.response_ids) for response in responses]
    results = pool.score(list(zip(problems, texts, strict=True)))
    return [(response, result, samples) for response, result in zip(responses, results, strict=True)]


def test_a_failing_agent_is_one_failed_sample_and_the_others_go_on() -> None:
    does = [*FAILS, *REWARDS, "fine"]
    with opened(config()) as pool:
        played = play(pool, does)
        figures = pool.take_figures([])
    said = {what: (result.reward, str(result.error)) for what, (_, result, _) in zip(does, played, strict=True)}
    other = [what for what in FAILS if said[what][0] is not None or not re.search(FAILS[what], said[what][1])]
    assert {what: said[what] for what in other} == {}
    for what, (response, result, samples) in zip(does, played, strict=True):
        if what in FAILS:
            continue
        assert (what, result.error, result.reward) == (what, None, REWARDS[what])
        assert (response.finish_reason == "length") >= (what == "never ends")
        context = response.response_ids[~response.loss_mask]
        assert context.tolist() == [3, *[4] * (len(context) - 1)]  # "0", and "1" each time: nothing of the model's
        assert len(context) == (5 if what == "never ends" else 2)  # environment.max_turns
        asked = [prompt for _, prompt, *_ in samples.asked]
        assert sum((1, *response.response_ids.tolist())[: len(prompt)] == prompt for prompt in asked) >= len(context)
    first = [room for _, prompt, _, room in played[0][2].asked if prompt == (1, 3)]
    assert [room for room in first if room < 100] == [2]  # max_tokens of "the run's own"
    assert figures["environment/restarts"] == 0
    assert figures["environment/new_histories"] == 0


def test_an_agent_that_hangs_is_one_failed_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from the many above, which make their clients at once and may take long over it."""
    monkeypatch.setattr(worker_process, "_EXTRA_TIME_S", 600.0)  # the worker ends the call itself, however slow it is
    with opened(config(timeout_s=20.0)) as pool:
        (_, hung, _), (_, fine, _) = play(pool, ["hangs", "fine"])
        assert pool.take_figures([])["environment/restarts"] == 0
    assert "the environment took longer in step than environment.timeout_s = 20 s" in str(hung.error)
    assert (fine.error, fine.reward) == (None, 1.0)


def test_settings_say_what_is_ignored_what_is_dropped_and_who_rates() -> None:
    """Fields that the run decides on; the last of two histories; text that a verifier rates; an agent that is async and
    streams."""
    agent = {"ignore": ["temperature", "seed"], "history": "restart", "verifier": f"{AGENTS}:is_not_empty"}
    with opened(config(agent=agent)) as pool:
        played = play(pool, list(TAKEN))
        figures = pool.take_figures([])
    assert [(result.error, result.reward) for _, result, _ in played] == [(None, reward) for reward in TAKEN.values()]
    assert figures["environment/new_histories"] == 2 / 8
    forgot, edited = played[2][0], played[3][0]
    assert forgot.response_ids[:1].tolist() == [4]  # of the last conversation alone
    assert edited.response_ids[:1].tolist() == [6]
    for response in (forgot, edited):
        runs = "".join("m" if own else "c" for own in response.loss_mask.tolist())
        assert "cm" not in runs.lstrip("c").lstrip("m")
    with opened(config("solve_async")) as pool:
        ((response, result, _),) = play(pool, ["any"])
    assert (result.error, result.reward) == (None, 1.0)
    assert response.response_ids[~response.loss_mask].tolist() == [5, 4, 3, 4]  # of its seed, 1, the second


def test_a_rehearsal_is_no_error_to_the_agent(capfd: pytest.CaptureFixture[str]) -> None:
    """Some print every one (`verifiers`, with "Exiting..."), and a good start would look like a failed one."""
    with opened(config("says_its_errors", concurrency=1)) as pool:
        pool.rehearse([Problem(each, "", each) for each in "ab"])
        ((_, result, _),) = play(pool, ["any"])
        assert (result.error, result.reward) == (None, 1.0)
        assert capfd.readouterr().err == ""
        with pytest.raises(ValueError, match="the agent ended without asking the model anything"):
            pool.rehearse([Problem("a", "", "asks nothing")])


@pytest.mark.parametrize("direct", ["*", "inner"])
def test_an_agent_calls_the_model_past_the_proxy_of_its_environment(direct: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("http_proxy", "http://127.0.0.1:9"), ("no_proxy", "other"), ("NO_PROXY", direct)):
        monkeypatch.setenv(name, value)
    with opened(config()) as pool:
        ((_, result, _),) = play(pool, ["fine"])
    assert (result.error, result.reward) == (None, 1.0)
    environment = config().environment
    EpisodeTable({**environment.model_dump(), "agent": EnvironmentWorkers.agent_setup(environment, None)})  # as the worker
    assert proxy_bypass("inner")


def test_an_agent_outside_takes_its_episode_and_sends_its_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a worker dies between the two."""
    unreached = Mock(side_effect=AssertionError("no agent outside can reach this worker"))
    monkeypatch.setattr(EnvironmentWorkers, "_start_alone", unreached)
    held = reserve_port("127.0.0.1")
    port = held.getsockname()[1]
    agent = {"port": port, "key_file": str(tmp_path / "key")}
    with held, opened(config(name="outside", agent=agent)) as pool:
        key = (tmp_path / "key").read_text()

        def work() -> None:
            for index in range(3):
                while True:
                    try:
                        found = httpx.post(f"http://127.0.0.1:{port}/episodes", headers=bearer(key), timeout=TIMEOUT_S)
                        break
                    except (httpx.NetworkError, httpx.RemoteProtocolError):
                        time.sleep(0.1)  # it listens from the first episode on
                if index == 0:
                    os.kill(pool.host._workers[0].process._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
                    continue
                episode = found.json()
                with httpx.Client(headers=bearer(episode["api_key"]), timeout=TIMEOUT_S) as client:
                    asked = {"model": "policy", "messages": episode["problem"]["messages"]}
                    answer = client.post(f"{episode['base_url']}/chat/completions", json=asked).json()
                    assert answer["choices"][0]["message"]["role"] == "assistant"
                    client.post(f"{episode['base_url']}/reward", json={"reward": float(episode["problem"]["answer"])})

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        played = play(pool, ["2", "3"], "012")
        thread.join(TIMEOUT_S)
        assert pool.take_figures([])["environment/restarts"] == 2
    assert [(result.error, result.reward) for _, result, _ in played] == [(None, 2.0), (None, 3.0)]
    assert [response.response_ids[:3].tolist() for response, *_ in played] == [[3, 4, 5]] * 2


def test_a_port_that_was_taken_is_asked_for_again() -> None:
    with reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        with opened(config(agent={"port": port})) as pool:
            with socket.create_server(("127.0.0.1", port)):
                ((_, failed, _),) = play(pool, ["fine"])
            ((_, result, _),) = play(pool, ["fine"])
    assert f"environment.agent.port = {port} cannot be listened on" in str(failed.error)
    assert (result.error, result.reward) == (None, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "guess_number"}, "guess_number is an environment, and no agent"),
        ({"adapter": "none"}, "environment.agent without environment.adapter = agent"),
        ({"network": False}, "environment.network = false with adapter = agent"),
        ({"workers": 2, "agent": {"port": 8600}}, "environment.workers = 2 cannot share environment.agent.port = 8600"),
        ({"name": "outside"}, "outside needs environment.agent.port and environment.agent.key_file"),
        ({"agent": {"ignore": ["n"]}}, "environment.agent.ignore"),
        ({"agent": {"ignore": ["seed", "seed"]}}, "names a field twice"),
    ],
)
def test_agents_that_cannot_be_are_refused_before_anything_starts(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"solve": "is_not_empty"}, r"the agent '.*:is_not_empty' is called with \(problem, base_url=…, api_key=…\)"),
        ({"kwargs": {"depth": 3}}, r"which it does not take \(got an unexpected keyword argument 'depth'\)"),
        ({"agent": {"verifier": "judge"}}, "environment.agent.verifier = .* must be a function of one response"),
        ({"agent": {"verifier": "nobody"}}, "unknown verifier 'nobody'"),
    ],
)
def test_an_agent_that_cannot_be_called_is_refused_at_the_start(change: dict[str, Any], message: str) -> None:
    environment = config(**change).environment
    with pytest.raises(ValueError, match=message):
        EpisodeTable({**environment.model_dump(), "agent": EnvironmentWorkers.agent_setup(environment, None)})


def test_a_tokenizer_without_a_beginning_is_refused() -> None:
    """END is in no prompt: all prompts of agents are the token that chats begin with."""
    environment = config().environment
    assert opening_of(environment, Letters()) == (1,)  # type: ignore[arg-type]
    bare: Any = SimpleNamespace(prompt_ids=Letters().encode)
    with pytest.raises(ValueError, match="the model's tokenizer has no begin token"):
        opening_of(environment, bare)


def test_agents_that_run_on_wear_their_process_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of ended episodes; neither those of open ones, nor one that ends in time."""
    monkeypatch.setattr(agents, "_MAX_RUNNING_AGENTS", 1)
    environment = config("runs_on").environment
    desk = EpisodeTable({**environment.model_dump(), "agent": EnvironmentWorkers.agent_setup(environment, None)})
    given = ["", "", "", {}, [], ""]

    async def play() -> list[bool]:
        worn = []
        for at in range(3):
            answer = await desk.answer(at, ["reset", given, at, False])
            assert answer["observation"][0] == "chat"
            worn.append(desk.worn)
            await desk.answer(at, ["end"])
            while at == 0 and any(each.name == "agent" for each in threading.enumerate()):
                await asyncio.sleep(0.01)  # it hears that its episode is over
            worn.append(desk.worn)
        await desk.answer(3, ["reset", given, 3, False])  # it goes on to say so while another episode is open
        return [*worn, desk.worn]

    assert asyncio.run(play()) == [False, False, False, False, False, True, True]


ENVIRONMENT = EnvironmentConfig(name="a.py:solve", adapter="agent")
SETTINGS = EnvironmentWorkers.agent_setup(ENVIRONMENT, None)
ASKED: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "0"}]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def serve(scene: Callable[[Any, httpx.AsyncClient], Awaitable[None]], outside_key: str | None = None) -> None:
    """``client`` asks ``address``, whose root is its base."""

    async def found() -> None:
        limits = WorkerLimits.of("", "", ENVIRONMENT.model_dump())
        address = agents.Agents(None, {}, {"agent": {**SETTINGS, "key": outside_key}}, limits).address
        root = (await address.url()).removesuffix("/v1")
        async with httpx.AsyncClient(base_url=root, timeout=TIMEOUT_S, verify=False) as client:
            await asyncio.wait_for(scene(address, client), TIMEOUT_S)

    asyncio.run(found())


def test_it_listens_on_loopback_alone() -> None:
    """On Linux all of 127.0.0.0/8 is this machine: an address for all interfaces would answer there too."""

    async def scene(address: Any, client: httpx.AsyncClient) -> None:
        assert client.base_url.host == "127.0.0.1"
        models = await client.get("/v1/models", headers=bearer(address.open(talk())))
        assert models.json()["data"][0]["id"] == "policy"
        assert "GET /nothing is not served here" in (await client.get("/nothing")).json()["error"]["message"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", int(client.base_url.port)), timeout=10)

    serve(scene)


def talk() -> AgentSession:
    return AgentSession("fail", "text")


@pytest.mark.parametrize("outside_key", [None, "outside"])
def test_a_request_without_the_key_of_an_episode_is_answered_nothing(
    outside_key: str | None, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """None, a part of one, that of an episode that is over, that of agents outside; and for these that of an episode. Nothing
    is written, whatever is sent.
    """

    async def scene(address: Any, client: httpx.AsyncClient) -> None:
        under_way, over = talk(), talk()
        key, old = address.open(under_way), address.open(over)
        del address.sessions[old]
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
        address.offers.put_nowait(episode)
        refused = 404 if outside_key is None else 401
        for headers in ({}, {"Authorization": ""}, bearer("None"), bearer("outsid"), bearer(key)):
            assert (await client.post("/episodes", headers=headers)).status_code == refused
        for rest, status in (
            (b"bad\x1b[31m header\r\n\r\n", 400),
            (b"Authorization: Bearer \xff\r\nContent-Length: 0\r\n\r\n", refused),
            (b"Transfer-Encoding: chunked\r\n\r\nno length\r\n", 400),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
            writer.write(b"POST /episodes HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + rest)
            assert int((await reader.read()).split()[1]) == status, rest
            writer.close()
        found = await client.post("/episodes", headers=bearer("outside"))
        if outside_key is None:
            assert found.status_code == refused
        else:
            assert found.json() == episode

    serve(scene, outside_key)
    assert (capfd.readouterr(), caplog.records) == (("", ""), [])


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

    serve(scene)


def asked(text: str) -> Any:
    return AgentRequest.read({"messages": [{"role": "user", "content": text}]}, SETTINGS["sampling"], frozenset())


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
@settings(max_examples=40)
def test_an_agents_request_that_is_none_fails_its_episode(body: bytes, path: str) -> None:
    async def scene(address: Any, client: httpx.AsyncClient) -> None:
        session = talk()
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

    serve(scene)


def test_an_agent_is_served_beside_connections_without_a_key() -> None:
    async def scene(address: Any, client: httpx.AsyncClient) -> None:
        port = client.base_url.port
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
        for _, writer in strangers[::2]:
            writer.write(b"POST /v1/reward HTTP/1.1\r\nContent-Le")
        assert await strangers[0][0].read(1) == b""
        key = address.open(talk())
        assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
        open_connections = sum(not reader.at_eof() for reader, _ in strangers)
        assert open_connections < 150
        for _, writer in strangers:
            writer.close()

    serve(scene)
