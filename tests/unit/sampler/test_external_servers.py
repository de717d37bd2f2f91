"""Trainer and servers of different machines: registry, and a server that is only found."""

import errno
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.runtime.restarts import named_job
from tepo_megatron.sampler.fleet import external
from tepo_megatron.sampler.fleet.server_pool import ServerPool
from tepo_megatron.sampler.vllm.server import Server
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tools.faults.processes import wait_gone, wait_until
from tests.support.faulty_server import FaultyServer
from tests.support.programs import TIMEOUT_S


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "_POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(external, "_WATCH_INTERVAL_S", 0.01)


@pytest.fixture
def stand_in(tmp_path: Path) -> external.ExternalServer:
    return external_server(tmp_path)


def external_server(registry: Path, model: Path | None = None) -> external.ExternalServer:
    config = ServerConfig(placement="external", registry=registry)
    return external.ExternalServer(config, registry=registry, index=0, key="key", log=registry / "server-0.log", model=model)


def pool(registry: Path, **options: Any) -> Any:
    config = ServerConfig(placement="external", registry=registry, interface="lo", start_timeout_s=TIMEOUT_S)
    where: dict[str, Any] = {"model_dir": resolve_model_path("builtin:tiny"), "log_dir": registry}
    return ServerPool(config, dtype="float32", stop_token_ids=(), **where, **options)


def wait(server: external.ExternalServer, timeout_s: float = TIMEOUT_S) -> None:
    server.config = server.config.model_copy(update={"start_timeout_s": timeout_s})
    server.wait_ready()


@pytest.fixture
def entry(tmp_path: Path) -> external.RegistryEntry:
    return external.RegistryEntry(tmp_path, 0)


def test_all_who_ask_at_once_get_one_key_that_only_its_owner_reads(tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    with ThreadPoolExecutor(16) as pool:
        keys = set(pool.map(lambda _: external.shared_key(folder), range(64)))
    assert len(keys) == 1
    assert len(keys.pop()) >= 40
    assert [path.name for path in folder.iterdir()] == ["key"]
    assert (folder / "key").stat().st_mode & 0o777 == 0o600


def test_a_key_or_a_folder_that_others_can_use_is_refused(tmp_path: Path) -> None:
    external.shared_key(folder := tmp_path / "registry")
    key = folder / "key"
    assert folder.stat().st_mode & 0o777 == 0o700
    key.chmod(0o640)
    with pytest.raises(RuntimeError, match=r"key belongs to user \d+ and has mode 0640, so that others can open it"):
        external.shared_key(folder)
    key.chmod(0o600)
    folder.chmod(0o770)
    with pytest.raises(RuntimeError, match=r"mode 0770, so that others can write to it(?s:.*)rollout\.server\.registry"):
        external.shared_key(folder)
    folder.chmod(0o700)
    if os.geteuid() == 0:  # only root can give a file away
        os.chown(key, 65534, 65534)
        with pytest.raises(RuntimeError, match="key belongs to user 65534"):
            external.shared_key(folder)
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=r"rollout\.server\.registry"):
        external.shared_key(tmp_path / "file" / "registry")


def test_a_server_is_found_used_retired_and_found_again(
    stand_in: external.ExternalServer, entry: external.RegistryEntry, server: FaultyServer
) -> None:
    stand_in.start()
    with pytest.raises(RuntimeError, match="external rollout server 0 was not there within"):
        wait(stand_in, 0.2)
    entry.register("http://127.0.0.1:9", "dead")
    with pytest.raises(RuntimeError, match="was not there"):
        wait(stand_in, 0.2)  # registered, but nobody answers
    entry.register(server.url, "first")
    wait(stand_in)
    assert stand_in.url == server.url
    assert stand_in.healthy()
    assert not entry.is_retired("first")

    stand_in.start()  # as after a failed update: that life is over, although it answers
    assert entry.is_retired("first")
    assert not stand_in.healthy()
    with pytest.raises(RuntimeError, match="was not there"):
        wait(stand_in, 0.2)
    entry.register(server.url, "second")
    wait(stand_in)
    assert stand_in.healthy()
    entry.register(server.url, "third")  # started again at the same address: it has none of the trainer's weights
    assert not stand_in.healthy()
    stand_in.start()
    wait(stand_in)
    assert stand_in.healthy()


def test_a_server_that_another_trainer_used_is_replaced_and_stopping_ends_a_wait(
    stand_in: external.ExternalServer, entry: external.RegistryEntry, server: FaultyServer, tmp_path: Path
) -> None:
    entry.register(server.url, "used")
    stand_in.start()
    wait(stand_in)
    later = external_server(tmp_path)
    later.start()
    with pytest.raises(RuntimeError, match="was not there"):
        wait(later, 0.2)
    assert entry.is_retired("used")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait, later)
        later.stop()
        with pytest.raises(RuntimeError, match="was ended"):
            waiting.result(TIMEOUT_S)


@pytest.mark.parametrize(("served", "shown"), [("/models/base", "/models/base"), ("", "an unknown model")])
def test_a_server_of_another_model_is_refused_to_those_who_use_its_own_weights(
    served: str,
    shown: str,
    stand_in: external.ExternalServer,
    entry: external.RegistryEntry,
    server: FaultyServer,
    tmp_path: Path,
) -> None:
    mine = tmp_path / "mine"
    entry.register(server.url, "first", served)
    with pytest.raises(ValueError, match=rf"serves {shown}.*, not {mine}; .* model.path = {mine} "):
        wait(started(external_server(tmp_path, mine)))
    wait(started(stand_in))  # a trainer sends its weights, and the other has not claimed the server
    entry.register(server.url, "second", str(mine))
    (tmp_path / "link").symlink_to(mine)
    wait(started(external_server(tmp_path, tmp_path / "link")))


def test_frozen_servers_belong_to_several_runs_and_then_to_no_trainer(server: FaultyServer, tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    external.shared_key(registry)
    entry = external.RegistryEntry(registry, 0)
    model = str(resolve_model_path("builtin:tiny").resolve())
    entry.register(server.url, "frozen", model)
    for _ in range(2):  # teachers of two runs, or evaluations
        teacher = pool(registry, with_ranks=True)
        teacher._launch(teacher._servers)
        assert [(one.url, one.was_used) for one in teacher._servers] == [(server.url, False)]
    assert not entry.is_retired("frozen")
    with pytest.raises(RuntimeError, match="was not there"):
        wait(started(external_server(registry)), 0.2)
    assert entry.is_retired("frozen")
    entry.register(server.url, "trained", model)
    wait(started(external_server(registry)))
    with pytest.raises(RuntimeError, match="was not there"):
        wait(started(pool(registry, with_ranks=True)._servers[0]), 0.2)
    assert entry.is_retired("trained")


@pytest.mark.parametrize("state", ['{"updating": false}', '{"updating": true}', "{}", "no JSON"])
def test_restarted_ranks_take_the_jobs_servers_again_unless_an_update_was_broken_off(
    tmp_path: Path, entry: external.RegistryEntry, server: FaultyServer, state: str
) -> None:
    server.progress = state
    with named_job("one"):
        entry.register(server.url, "used")
        for number in range(3):
            stand_in = external_server(tmp_path)
            stand_in.start()
            if number == 0 or state == '{"updating": false}':
                wait(stand_in)
                assert (stand_in.url, stand_in.was_used) == (server.url, number > 0)
            else:
                with pytest.raises(RuntimeError, match="was not there"):
                    wait(stand_in, 0.2)
                assert entry.is_retired("used")
    with named_job("another"), pytest.raises(RuntimeError, match="was not there"):
        wait(started(external_server(tmp_path)), 0.2)
    assert entry.is_retired("used")


class Disk:
    """``names``: files whose next reading or writing fails, as on a shared disk that a node loses for a moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        for name in ("read_text", "read_bytes", "exists", "open"):
            monkeypatch.setattr(Path, name, self._failing(getattr(Path, name)))

    def _failing(self, action: Any) -> Any:
        def act(path: Path, *args: Any, **options: Any) -> Any:
            if path.name in self.names:
                self.names.remove(path.name)
                raise OSError(errno.ESTALE, "Stale file handle", str(path))
            return action(path, *args, **options)

        return act


def test_a_disk_that_fails_for_a_moment_ends_no_wait(
    stand_in: external.ExternalServer, entry: external.RegistryEntry, server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry.register(server.url, "first")
    wait(started(stand_in))
    entry.register(server.url, "second")
    disk = Disk(monkeypatch)
    disk.names = ["server-0.retired.partial", "server-0.json", "server-0.retired", "server-0.second.claimed"]
    wait(started(stand_in))
    assert (disk.names, stand_in.healthy(), entry.is_retired("first")) == ([], True, True)
    disk.names = ["server-0.json"] * 1000
    with pytest.raises(RuntimeError, match=r"was not there within .* the disk answered: .*Stale file handle"):
        wait(started(stand_in), 0.2)


def started(server: external.ExternalServer) -> external.ExternalServer:
    server.start()
    return server


def run_of(folder: Path, **server: Any) -> RunConfig:
    server = {"placement": "external", "registry": str(folder), "interface": "lo", **server}
    return RunConfig.model_validate({"rollout": {"server": server}, "output": str(folder)})


def test_a_node_that_cannot_serve_tells_the_trainer_why_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "make_all", MagicMock(side_effect=ValueError("there is too little memory")))
    with pytest.raises(ValueError, match="too little memory"):
        external.serve_node(run_of(tmp_path), model_dir=Path("model"), node=0, nodes=1)
    with pytest.raises(RuntimeError, match="too little memory"):
        wait(started(external_server(tmp_path)))


def test_servers_end_when_the_trainer_has_closed_their_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = MagicMock(alive=True, url="http://127.0.0.1:1", port=1)
    monkeypatch.setattr(Server, "make_all", lambda *_, **__: [server])
    server.wait_ready.side_effect = lambda: (tmp_path / "closed").write_text("0\n")
    external.serve_node(run_of(tmp_path), model_dir=Path("model"), node=0, nodes=1)
    assert server.stop.call_count == 2  # before it starts, and at the end


HOLDER = """
import os, sys, time
from pathlib import Path
from tepo_megatron.sampler.fleet.external import end_with_starter
folder = Path(sys.argv[1])
with (folder / "lives").open("a") as file:
    file.write(f"{os.getpid()}\\n")
end_with_starter()
time.sleep(1000)
"""


def test_what_holds_the_servers_outlives_a_kill_but_not_its_starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "held.py").write_text(HOLDER)
    monkeypatch.setattr(external, "_COMMAND", (sys.executable, str(tmp_path / "held.py"), str(tmp_path)))
    config = RunConfig.model_validate({"rollout": {"server": {"max_restarts": 1}}, "output": str(tmp_path)})

    def lives(count: int) -> list[int]:
        file = tmp_path / "lives"
        wait_until(lambda: file.exists() and file.read_text().count("\n") == count, TIMEOUT_S, f"{count} lives")
        return [int(line) for line in file.read_text().split()]

    with external.servers_for_ranks(config):
        first = lives(1)
    assert not wait_gone(first, TIMEOUT_S)
    assert external.registry_for_ranks() is None
    with external.servers_for_ranks(config):
        registry = external.registry_for_ranks()
        assert registry is not None
        assert registry.stat().st_mode & 0o777 == 0o700
        for count in (2, 3):
            os.kill(lives(count)[-1], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="holds the rollout servers ended with exit code -9, too often"):
            wait(started(external_server(registry)))
    monkeypatch.setattr(external, "_COMMAND", (str(tmp_path / "gone"),))
    with external.servers_for_ranks(config):
        registry = external.registry_for_ranks()
        assert registry is not None
        with pytest.raises(RuntimeError, match=r"holds the rollout servers cannot be started: .*No such file"):
            wait(started(external_server(registry)))


def test_the_address_is_that_of_the_interface_or_of_the_machines_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(found: str | OSError, **config: Any) -> str:
        monkeypatch.setattr("tepo_megatron.sampler.fleet.external.socket.gethostbyname", MagicMock(side_effect=[found]))
        return external.with_local_address(ServerConfig(placement="external", registry=Path("r"), **config)).host

    assert address("10.1.2.3") == "10.1.2.3"
    assert address("10.1.2.3", interface="lo") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"\.interface = 'none0' has no IPv4 address on .*; interfaces here: .*lo"):
        address("10.1.2.3", interface="none0")
    for found, what in (("127.0.1.1", r"loopback address 127\.0\.1\.1"), (OSError("unknown"), r"no address \(unknown\)")):
        with pytest.raises(ValueError, match=rf"stands for .*{what}.*set rollout\.server\.interface"):
            address(found)


@pytest.mark.parametrize(
    ("server", "place", "message"),
    [
        ({}, (0, 1), "needs rollout.server.placement = external"),
        ({"placement": "external", "registry": "r", "count": 3}, (0, 2), "3 servers cannot be spread over 2 nodes"),
        ({"placement": "external", "registry": "r"}, (1, 1), "node 1 is not one of 1 nodes"),
    ],
)
def test_a_node_that_cannot_serve_says_why(server: dict[str, Any], place: tuple[int, int], message: str) -> None:
    config = RunConfig.model_validate({"rollout": {"server": server}})
    with pytest.raises(ValueError, match=message):
        external.serve_node(config, model_dir=Path("model"), node=place[0], nodes=place[1])


class FakeServer(FaultyServer):
    """In place of a vLLM server, which nobody asks."""

    def __init__(self, *_: Any, log: Path, gpus: range, **__: Any) -> None:
        super().__init__()
        self.close()
        self.log, self.gpus = log, tuple(gpus)


@pytest.mark.parametrize(("load_format", "model"), [("model", str(Path.cwd() / "model")), ("auto", "")])
def test_a_node_replaces_what_died_and_what_was_retired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_format: str, model: str
) -> None:
    made: list[FakeServer] = []

    def make(*arguments: Any, **options: Any) -> FakeServer:
        made.append(FakeServer(*arguments, **options))
        return made[-1]

    monkeypatch.setattr("tepo_megatron.sampler.vllm.server.Server", make)
    config = run_of(tmp_path, count=4, tp=2, max_restarts=1, load_format=load_format)
    entries = [external.RegistryEntry(tmp_path, index) for index in range(4)]
    first: list[Any] = []
    turns = iter(
        [
            lambda: first.extend(entry.registered() for entry in entries),
            lambda: setattr(made[0], "alive", False),
            lambda: entries[3].retire(entries[3].registered().life),
            lambda: setattr(made[1], "alive", False),
        ]
    )
    watch = SimpleNamespace(sleep=lambda _: next(turns)(), monotonic=time.monotonic)  # other threads sleep, too
    monkeypatch.setattr("tepo_megatron.sampler.fleet.external.time", watch)
    with pytest.raises(RuntimeError, match=r"died 3 times.*\n.*the end of its log"):
        external.serve_node(config, model_dir=Path("model"), node=1, nodes=2)
    assert first[:2] == [None, None]  # the other node's
    assert first[2].model == model  # "" waits for a trainer's weights
    assert [each.gpus for each in made] == [(0, 1), (2, 3)]
    assert [each.log.name for each in made] == ["server-2.log", "server-3.log"]
    assert [each.starts for each in made] == [2, 2]
    now = [entry.registered() for entry in entries[2:]]
    assert now[0] != first[2]
    assert now[1] != first[3]
    assert not any(each.alive for each in made)


@pytest.mark.parametrize("works", [True, False])
def test_a_replacement_that_does_not_come_up_is_one_more_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    servers = [FakeServer(log=tmp_path / "log", gpus=range(1)) for _ in range(2)]
    monkeypatch.setattr(Server, "make_all", lambda *_, **__: servers)
    seen: list[Any] = []

    def wait_ready() -> None:
        if servers[0].starts == 2 or (servers[0].starts > 2 and not works):
            servers[0].alive = False
            raise RuntimeError("it ended before it was ready.\nIts log")

    def sleep(_: float) -> None:
        seen.append((external.RegistryEntry(tmp_path, 0).registered(), *(server.starts for server in servers)))
        if servers[0].starts == 1:
            servers[0].alive = False
        elif servers[0].starts == 3 and works:
            (tmp_path / "closed").touch()

    monkeypatch.setattr(servers[0], "wait_ready", wait_ready)
    monkeypatch.setattr("tepo_megatron.sampler.fleet.external.time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    message = r"died 3 times; none is started again\. The last failed start: it ended before it was ready\.\n"
    with nullcontext() if works else pytest.raises(RuntimeError, match=message):
        external.serve_node(run_of(tmp_path, count=2, max_restarts=1), model_dir=Path("model"), node=0, nodes=1)
    first, failed, last = seen
    assert (first[1:], failed, last[1:]) == ((1, 1), (first[0], 2, 1), (3, 1))
    assert (last[0] != first[0]) == works
    assert bool(list(tmp_path.glob("failed-*"))) != works


def test_a_node_outlives_a_disk_that_fails_for_a_moment_and_tells_the_trainer_of_another_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer(log=tmp_path / "log", gpus=range(1))
    monkeypatch.setattr(Server, "make_all", lambda *_, **__: [server])
    disk = Disk(monkeypatch)
    turns = iter(
        [
            lambda: disk.names.extend(["closed", "server-0.retired"]),
            lambda: disk.names.append("server-0.json.partial"),
            server.stop,
        ]
    )
    watch = SimpleNamespace(sleep=lambda _: next(turns)(), monotonic=time.monotonic)
    monkeypatch.setattr("tepo_megatron.sampler.fleet.external.time", watch)
    with pytest.raises(OSError, match="Stale file handle"):
        external.serve_node(run_of(tmp_path), model_dir=Path("model"), node=0, nodes=1)
    assert (disk.names, server.starts) == ([], 2)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="Stale file handle"):
        wait(started(external_server(tmp_path)))
