"""Borders that are answers and addresses, and the class of faults that tries all of ``hostile.ENTRIES``, files too."""

import asyncio
import io
import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import httpx
from rich.table import Table
from rich.text import Text

from tepo_megatron.config import LogConfig
from tepo_megatron.config.reward import EnvironmentConfig
from tepo_megatron.config.rollout import SamplingConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.run.display.progress import Progress
from tepo_megatron.run.loggers import without_secrets
from tepo_megatron.run.metrics import MetricsWriter, read_metrics
from tepo_megatron.runtime.rank import print_error
from tepo_megatron.runtime.terminal import Terminal
from tepo_megatron.runtime.text import echo
from tepo_megatron.runtime.worker_child import WorkerLimits
from tepo_megatron.sampler.sampling import Sample, Sampling
from tepo_megatron.sampler.vllm.client import Client
from tepo_megatron.sampler.vllm.wire import head_frame, response_frame
from tepo_megatron.tasks.environments.agent_session import EpisodeError
from tepo_megatron.tasks.environments.episodes import Observations
from tepo_megatron.tasks.environments.protocol import EpisodeAnswer, read_key
from tepo_megatron.tasks.environments.service import EnvironmentService, RemoteEnvironments
from tepo_megatron.tasks.environments.workers import EnvironmentWorkers
from tepo_megatron.tasks.reward.judge import Judge
from tepo_megatron.tools.faults import file_borders  # noqa: F401 (they are entries too)
from tepo_megatron.tools.faults.episode_borders import ANSWER, REQUEST, InProcess
from tepo_megatron.tools.faults.hostile import (
    ENTRIES,
    Hostile,
    attempt,
    border,
    chat_tokenizer,
    is_shown,
    needs_unicode,
    refusable,
)
from tepo_megatron.tools.faults.input_faults import limit_process
from tepo_megatron.tools.faults.processes import in_fork
from tepo_megatron.tools.faults.workshop import FaultClass, FaultOutcome

# -- HTTP --------------------------------------------------------------------------------------------------------------------


def _sound_reply(body: bytes, head: str = "200 OK", length: int | None = None, kind: str = "application/json") -> bytes:
    length = len(body) if length is None else length
    return f"HTTP/1.1 {head}\r\nConnection: close\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n".encode() + body


def _reply_of(body: bytes, random: Hostile) -> bytes:
    how, length = random.random(), len(body)
    if how < 0.1:
        return random.choice((b"", b"HTTP/1.1 200 OK\r\n", b"\0" * 9, b"HTTP/1.1 999 \xff\r\n\r\n", b"x\r\n\r\n"))
    head = random.choice(("200 OK",) * 6 + ("500 no", "401 no", "429 busy", "302 away\r\nLocation: /x", "204 none"))
    if how < 0.2:
        return (
            f"HTTP/1.1 {head}\r\nTransfer-Encoding: chunked\r\n\r\n{random.choice(('zz', '-1', '5', ''))}\r\n".encode() + body
        )
    if how < 0.3:
        length = random.choice((0, length + 7, max(length - 2, 0)))
    kind = random.choice(("application/json", "text/plain; charset=x", "text/html"))
    return _sound_reply(body, head, length, kind)


@contextmanager
def _answering(replies: Callable[[bytes], bytes]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    connection.sendall(replies(connection.recv(1 << 16)))
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@border("judge")
def _judge(folder: Path, random: Hostile) -> None:
    score = random.choice(("Score: 1", "Score: 1", f"Score: {'9' * 400}", random.text()))
    reply = _reply_of(random.json({"choices": [{"message": {"content": score}}]}), random)

    async def ask(url: str) -> Any:
        judge = Judge(url, "m", retries=0, timeout_s=5.0)
        try:
            return await judge.score(Problem("p", "1+1=", "2"), ResponseText("2"))
        finally:
            await judge._client.aclose()

    with _answering(lambda _: reply) as url:
        assert isinstance(asyncio.run(ask(url)), float)


@border("environment servers")
def _servers(folder: Path, random: Hostile) -> None:
    key = folder / "key"
    read_key(key, write=True)
    opened = random.random() < 0.7

    def replies(request: bytes) -> bytes:
        if b"POST /sessions HTTP" in request:
            sound = {"session": "s", "notice": None}
            return _sound_reply(json.dumps(sound).encode()) if opened else _reply_of(random.json(sound), random)
        answers = [[0, ANSWER, None, None, False, 0.1]]
        return _reply_of(random.json(answers if b"/answers" in request else {"a": 1}), random)

    with _answering(replies) as url:
        config = EnvironmentConfig(name="calculator", servers=(url,), key_file=key)
        with closing(RemoteEnvironments(config)) as host:
            host.call(0, ["reset", Problem("p", "", "7").to_json(), 0, False])
            for _ in range(20):
                for answer in host.poll(0.2):
                    assert answer.episode == 0
                    return


@border("sampler")
def _sampler(folder: Path, random: Hostile) -> None:
    frames = [response_frame(0, [5, 6], [-0.5, -0.1], "stop", [(0, "0:")], cached=0), head_frame({"end": 1})]
    heads = [
        {"sample": 0, "finish_reason": "stop", "versions": [[0, "0:"]], "arrays": {"ids": ["<i4", [1]]}},
        {"end": 1},
        {"error": "e"},
    ]
    stream = b"".join(frames) if random.random() < 0.5 else head_frame({}) + random.json(random.choice(heads))
    if random.random() < 0.5:
        text = random.json(random.choice(heads))
        stream = len(text).to_bytes(4, "little") + text + random.randbytes(8)
    scored = {"prompt_logprobs": [None, {"5": {"logprob": -0.5, "rank": 1}}], "facts": "f", "success": True}
    bodies = [random.damaged(stream) if random.random() < 0.5 else stream, random.json(scored)]

    def replies(request: bytes) -> bytes:
        return _reply_of(bodies[b"/tepo/samples" not in request], random)

    with _answering(replies) as url:
        client = Client(url, "key", 5.0, vocab_size=300)
        version, sampling = WeightsVersion(0), Sampling(1.0, 4)
        draw = partial(client.draw, "a", [1, 5], [Sample(0, 1, 4)], sampling, lambda: (version,))
        calls = (draw, lambda: client.facts, lambda: client.score([1, 5], 1), client.progress, client.reset_prefix_cache)
        try:
            for call in calls:
                with refusable():
                    result: Any = call()
                    for _, response in result if call is draw else ():
                        assert (response.logprobs <= 1e-3).all()
        finally:
            client.close()


def _request_of(path: str, key: str, body: bytes, random: Hostile) -> bytes:
    length: Any = random.choice((len(body),) * 4 + (len(body) + 9, -1, "9" * 5000, 2**40, "x", max(0, len(body) - 3), "1_0"))
    lines = [f"POST {path} HTTP/1.1", "Host: a", f"Authorization: Bearer {random.choice((key, key, key, 'no', key[:-1], 'é'))}"]
    lines.append("Transfer-Encoding: chunked" if random.random() < 0.2 else f"Content-Length: {length}")
    lines += ["A: " + "b" * 100_000] * (random.random() < 0.1)
    data = ("\r\n".join(lines) + "\r\n\r\n").encode() + body
    return random.damaged(data) if random.random() < 0.3 else data


def _connected(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.split(":")[2].partition("/")[0])), timeout=30.0)


def _send(url: str, data: bytes) -> None:
    reply = b""
    with _connected(url) as client, suppress(OSError):
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        while part := client.recv(1 << 16):
            reply += part
    assert not re.match(rb"HTTP/1\.\d 50[^1]", reply), reply[:200]


@border("environment serve")
def _service(folder: Path, random: Hostile) -> None:
    config = EnvironmentConfig(name="guess_number", timeout_s=60.0)
    key = "k" * 20
    host = InProcess(lambda episode, call: EpisodeAnswer(episode, dict(ANSWER)))
    described = {"name": "guess_number", "adapter": "none", "kwargs": {}}
    errors = io.StringIO()
    with (
        patch("tepo_megatron.tasks.environments.service.EnvironmentWorkers", lambda *_: host),
        patch.object(sys, "stderr", errors),
    ):
        service = EnvironmentService(config, host="127.0.0.1", port=0, key=key)
        thread = threading.Thread(target=service.serve)
        thread.start()
        try:
            with httpx.Client(
                base_url=service.url, headers={"Authorization": f"Bearer {key}"}, trust_env=False, timeout=60.0
            ) as trainer:
                session = trainer.post("/sessions", json={"environment": described}).json()["session"]
                calls = f"/sessions/{session}/calls"
                reset = ["reset", Problem("p", "", "7").to_json(), 0, False]
                sound = {"/sessions": {"environment": described}, calls: [[1, reset], [1, ["step", "a", "", "stop"]]]}
                sound[f"/sessions/{session}/answers"] = {"wait_s": 0}
                for path in [*sound] * 2:
                    _send(service.url, _request_of(path, key, random.json(sound[path]), random))
                with _connected(service.url) as slow, _connected(service.url) as stranger:
                    slow.sendall(b"POST /sessions HTTP/1.1\r\nContent-Le")
                    stranger.sendall(b"POST /sessions HTTP/1.1\r\nContent-Length: 60000000\r\n\r\n")
                    stranger.settimeout(5.0)
                    assert stranger.recv(12).endswith(b"401"), "a body without a key was read"
                    assert trainer.post(calls, json=[[9, reset]]).is_success
                    answers: list[Any] = []
                    while not any(item[0] == 9 for item in answers):
                        answers += trainer.post(f"/sessions/{session}/answers", json={"wait_s": 5}).json()
        finally:
            service.stop()
            thread.join()
    assert "Traceback" not in errors.getvalue(), errors.getvalue()[-300:]


def _agent(problem: Problem, base_url: str, api_key: str, data: Any) -> float:
    if problem.answer == "hostile":
        for path in ("/v1/chat/completions", "/v1/reward", "/v1/chat/completions"):
            body = {"reward": 1.0} if "reward" in path else REQUEST
            _send(base_url, _request_of(path, api_key, data.json(body), data))
        return data.value()
    request = {"messages": [{"role": "user", "content": "1"}]}
    reply = httpx.post(
        f"{base_url}/chat/completions", json=request, headers={"Authorization": f"Bearer {api_key}"}, timeout=60.0
    )
    assert reply.json()["choices"][0]["message"]["content"] == "2", reply.text
    return 1.0


@border("agents' address")
def _address(folder: Path, random: Hostile) -> None:
    from tepo_megatron.tasks.environments.agents import Agents

    config = EnvironmentConfig(name="a.py:a", adapter="agent", timeout_s=60.0)
    setup = {"name": "a", "agent": EnvironmentWorkers.agent_setup(config, SamplingConfig())}
    limits = WorkerLimits.of("environment", "environment", config.model_dump() | {"network": True})
    agents = Agents(_agent, {"data": random}, setup, limits)

    async def play(answer: str) -> Any:
        episode = agents.episode()
        try:
            request: Any = await episode.reset(Problem(answer, "1+1=", answer), 0)
            for _ in range(4):
                with refusable():
                    Observations(chat_tokenizer(), 300).ids(["chat", json.loads(json.dumps(vars(request)))], ended=True)
                result = await episode.step(ResponseText("2", (5,), "stop"))
                request = result.observation
                if result.done:
                    return result.reward
        except EpisodeError as error:
            return str(error)
        finally:
            episode.close()

    async def both() -> Any:
        return await asyncio.gather(play("hostile"), play("sound"))

    hostile, sound = asyncio.run(both())
    assert sound == 1.0, f"a neighbour's episode: {sound}, beside {hostile}"


# -- what is printed, logged and written -------------------------------------------------------------------------------------


@border("terminal")
def _terminal(folder: Path, random: Hostile) -> None:
    text, encoding = random.text(), random.choice(("utf-8", "latin-1", "ascii"))
    stream = io.TextIOWrapper(io.BytesIO(), encoding, write_through=True)
    with patch.object(sys, "stdout", stream), patch.object(sys, "stderr", stream):
        echo(text)
        print_error(text)
        table = Table("–", title=Text(text))
        table.add_row(Text(text))
        Terminal(width=40).print(table, text, markup=False)
        progress = Progress.of(LogConfig(progress=random.choice(("plain", "live"))), stream)
        progress.message(text)
        progress.close()
    shown = stream.buffer.getvalue().decode(encoding)
    assert is_shown(shown, encoding), f"{shown[:200]!r}"


@border("loggers and metrics")
def _loggers(folder: Path, random: Hostile) -> None:
    needs_unicode(without_secrets({random.text(): [random.value(0)]}))
    name = random.text()
    with closing(MetricsWriter(folder, tensorboard=True)) as metrics:
        metrics.write(1, {name: random.choice((0.5, float("nan"), 1e308, 1e39))})
    (row,) = read_metrics(folder / "metrics.jsonl")
    assert list(row) == ["step", json.loads(json.dumps(name))], f"other names: {list(row)}"


# -- the class of faults -----------------------------------------------------------------------------------------------------

_TRIES, _SLOW = 30, {"environment serve": 5, "verifier's pipe": 5}  # a second each
_LIMIT_S = 60


def _tries(name: str, folder: Path, seed: int, tries: int) -> Sequence[str]:
    limit_process(_LIMIT_S)
    results = [attempt(name, folder, number) for number in range(seed, seed + tries)]
    lost = [("lost", f"seed {seed + index}: {message}") for index, (result, message) in enumerate(results) if result == "lost"]
    return (lost or [item for item in results if item[0] == "refused"] or results)[0]


class _Borders(FaultClass):
    name = "borders"
    title = "hostile values at every border"
    whole, quick = 3 * len(ENTRIES), len(ENTRIES)

    def inject(self, number: int, rng: Random) -> FaultOutcome:
        chat_tokenizer()  # is cached here, and not in each fork
        name, seed = list(ENTRIES)[number % len(ENTRIES)], rng.randrange(10**9)
        tries = 1 if self.workshop.is_quick else _SLOW.get(name, _TRIES)
        answer = in_fork(_tries, name, self.folder, seed, tries, limit_s=10.0 * _LIMIT_S)
        result: Any
        result, message = answer or ("lost", f"no answer within {_LIMIT_S} s of processor time and its memory")
        return FaultOutcome(f"{name}, seeds {seed} to {seed + tries - 1}", result, message)


FAULTS: tuple[type[FaultClass], ...] = (_Borders,)
