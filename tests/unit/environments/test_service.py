"""Environments on another machine: the same episodes as beside the trainer, under a key, and what becomes of a server that
goes.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tepo_megatron.cli.main import app
from tepo_megatron.config import RunConfig
from tepo_megatron.config.reward import EnvironmentConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.environments.environment_task import EnvironmentTask
from tepo_megatron.tasks.environments.protocol import read_key
from tepo_megatron.tasks.environments.service import EnvironmentService, RemoteEnvironments
from tests.support import episodes
from tests.support.episodes import VOCABULARY, FakeSamples
from tests.support.programs import TIMEOUT_S
from tests.unit.environments.test_workers import HOSTILE, PROMPT, Letters, play

OWN = {"name": f"{HOSTILE}:Hostile", "timeout_s": 600.0, "max_turns": 4}


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
