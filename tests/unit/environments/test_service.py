"""Environments on another machine: the same episodes as beside the trainer, under a key, and what becomes of a server that
goes. Who has no key is answered without being read, nobody takes all connections, and a body that is no request is refused.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from typer.testing import CliRunner

from tepo_megatron.cli.main import app
from tepo_megatron.config import RunConfig
from tepo_megatron.config.reward import EnvironmentConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.environments.environment_task import EnvironmentTask
from tepo_megatron.tasks.environments.protocol import EpisodeAnswer, read_key
from tepo_megatron.tasks.environments.service import EnvironmentService, RemoteEnvironments
from tests.support import episodes
from tests.support.episodes import VOCABULARY, FakeSamples, Letters
from tests.support.hostile import as_json, broken_json, values
from tests.support.programs import TIMEOUT_S
from tests.unit.environments.test_workers import HOSTILE, PROMPT, play

OWN = {"name": f"{HOSTILE}:Hostile", "timeout_s": 600.0, "max_turns": 4}
GAME = {"name": "guess_number", "timeout_s": 600.0}
LARGEST = 60 * 2**20
DEEP = b"[" * 3000


@contextmanager
def serving(key: str, **changes: Any) -> Iterator[EnvironmentService]:
    service = EnvironmentService(EnvironmentConfig(**{**OWN, **changes}), host="127.0.0.1", port=0, key=key)
    thread = threading.Thread(target=service.serve)
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        thread.join()


def test_episodes_on_servers_are_those_beside_the_trainer(tmp_path: Path) -> None:
    """Then one of the two goes: its episodes are begun again on the other; and then the other: the run cannot go on."""
    key_file = tmp_path / "keys" / "environment"
    key = read_key(key_file, write=True)
    problems = [Problem(f"{what} {at}", "", what) for at in range(3) for what in ("fine", "raises", "dies", "ends at once")]
    with serving(key) as first, serving(key) as second:
        remote = {**OWN, "servers": [first.url, second.url], "key_file": str(key_file)}
        found = {}
        for name, environment in (("here", OWN), ("there", remote)):
            config = RunConfig.model_validate({"environment": environment})
            with EnvironmentTask(config, Letters(), VOCABULARY, 60) as pool:  # type: ignore[arg-type]
                pool.rehearse(problems)
                found[name] = play(pool, problems)
        assert list(found["here"]) == list(found["there"])
        for key_, (response, result) in found["here"].items():
            there, rated = found["there"][key_]
            assert (there.response_ids.tolist(), rated.reward) == (response.response_ids.tolist(), result.reward)
            assert str(rated.error)[:60] == str(result.error)[:60]

        config = RunConfig.model_validate({"environment": remote})
        with EnvironmentTask(config, Letters(), VOCABULARY, 60) as pool:  # type: ignore[arg-type]
            assert isinstance(pool.host, RemoteEnvironments)
            samples: Any = FakeSamples(random.Random(0))
            with pool.stream(samples, lambda at: problems[at]) as stream:
                for at in range(len(problems)):
                    stream.submit(at, PROMPT, 10 * at, 1)
                first._sessions.clear()  # it does not know the trainer any longer
                assert len(episodes.play(stream)) == len(problems)
            assert pool.take_figures([])["environment/restarts"] >= 1
            second._sessions.clear()
            with pool.stream(samples, lambda at: problems[at]) as stream:
                stream.submit(0, PROMPT, 0, 1)
                with pytest.raises(RuntimeError, match=r"no environment server is left: .*start them again"):
                    list(iter(lambda: stream.next(1.0), "never"))


def test_strangers_and_other_environments_are_refused(tmp_path: Path) -> None:
    key = read_key(tmp_path / "key", write=True)
    with serving(key) as service:
        port = httpx.URL(service.url).port
        assert port is not None
        with pytest.raises(ConnectionRefusedError):  # it listens on the address that it was given, not on all of this machine
            socket.create_connection(("127.0.0.2", port), timeout=10)

        def post(path: str, **given: Any) -> httpx.Response:
            return httpx.post(f"{service.url}{path}", timeout=TIMEOUT_S, **given)

        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Bearer " + key[:-1]}):
            assert post("/sessions", json={}, headers=headers).status_code == 401
        own = {"Authorization": f"Bearer {key}"}
        assert post("/sessions/none/calls", json=[], headers=own).status_code == 404
        assert post("/sessions", content=b"{", headers=own).status_code == 400
        wanted = {"name": OWN["name"], "adapter": "none", "kwargs": {}}
        session = post("/sessions", json={"environment": wanted}, headers=own).json()["session"]
        for calls in ([[1, ["run", "rm"]]], [["1", ["end"]]], {"a": 1}, [[1, ["step", "a"]]]):
            assert post(f"/sessions/{session}/calls", json=calls, headers=own).status_code == 400
        assert post(f"/sessions/{session}/calls", json=[[1, ["step", "", "", ""]]], headers=own).is_success

        def refused(key_file: Path, **changes: Any) -> str:
            config = EnvironmentConfig(**{**OWN, "servers": (service.url,), "key_file": key_file, **changes})
            with pytest.raises(ValueError, match="environment") as caught:
                RemoteEnvironments(config)
            return str(caught.value)

        assert "this server runs" in refused(tmp_path / "key", kwargs={"broken": True})
        other = tmp_path / "other"
        assert read_key(other, write=True) != key
        assert "has another key than environment.key_file" in refused(other)
    with pytest.raises(RuntimeError, match="does not answer"):
        RemoteEnvironments(EnvironmentConfig(**{**OWN, "servers": (service.url,), "key_file": tmp_path / "key"}))


def test_the_command_serves_this_machine_alone_unless_it_is_told_another_address() -> None:
    shown = CliRunner().invoke(app, ["environment", "serve", "--help"]).output
    assert "[default: 127.0.0.1]" in " ".join(shown.replace("│", " ").split())


def test_a_key_is_its_owners_alone(tmp_path: Path) -> None:
    key = read_key(tmp_path / "key", write=True)
    assert read_key(tmp_path / "key") == key == read_key(tmp_path / "key", write=True)
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ValueError, match="can be read by others than you; chmod 600"):
        read_key(tmp_path / "key")
    with pytest.raises(ValueError, match="'tepo environment serve' writes it"):
        read_key(tmp_path / "none")


# -- strangers and hostile bodies


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "key"
    read_key(path, write=True)
    return path


@pytest.fixture(scope="module")
def service(key_file: Path) -> Iterator[EnvironmentService]:
    with serving(key_file.read_text(), **GAME) as service:
        yield service


def play_an_episode(service: EnvironmentService, key_file: Path) -> None:
    host = RemoteEnvironments(EnvironmentConfig.model_validate({**GAME, "servers": [service.url], "key_file": key_file}))
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


def test_the_key_comes_before_the_body_and_a_length_that_is_none_is_refused(
    service: EnvironmentService, key_file: Path
) -> None:
    key = key_file.read_text()
    cases: list[tuple[str, int | str, str, int]] = [
        (path, LARGEST, "", 401) for path in ("/sessions", "/sessions/x/calls", "/")
    ]
    cases += [("/sessions", length, key, 413) for length in ("9" * 5000, "-1", "1_0", str(2**40), "x")]
    for path, length, sent, expected in cases:
        with connect(service.url) as client:
            client.sendall(head(path, length, sent))
            assert status(client) == expected, (path, length)
    play_an_episode(service, key_file)


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
    with httpx.Client(
        base_url=service.url, headers={"Authorization": f"Bearer {key_file.read_text()}"}, timeout=TIMEOUT_S, verify=False
    ) as client:
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


def test_a_wait_that_is_none_is_refused(trainer: httpx.Client) -> None:
    path = f"/sessions/{open_session(trainer)}/answers"
    waits: list[Any] = ["x", None, [], -1, math.nan, math.inf, "1e400", 10**400]
    for wait_s in waits:
        reply = trainer.post(path, content=json.dumps({"wait_s": wait_s}))
        assert (reply.status_code, bool(reply.json()["error"])) == (400, True), wait_s
