"""Servers that share the trainer's GPUs, and others, as the fleet drives them: which requests each gets, in which order."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.sampler.fleet.sync import ShardSync
from tepo_megatron.sampler.protocol import ServerDied
from tepo_megatron.sampler.vllm.client import Client
from tepo_megatron.sampler.vllm.resources import visible_gpus
from tepo_megatron.sampler.vllm.server import Server
from tepo_megatron.sampler.vllm.wire import SAMPLES
from tests.support.programs import TIMEOUT_S
from tests.support.samples import answer, draw_group, response


class StandIn:
    """A server of this process, with a ``Server``'s methods, that notes requests; ``dead_at`` is the one that it dies of."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.dead_at = ""
        self.version = "default"
        self.status: dict[str, Callable[[], int]] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("content-length", 0)))
                outer.calls.append(self.path)
                if self.path == outer.dead_at:
                    self.connection.close()
                    return
                body = json.loads(raw) if raw else {}
                outer.version = body.get("weight_version", outer.version)
                samples = [wanted["sample"] for wanted in body.get("samples", ())]
                content = answer([response(at, [2], [-1.0], "stop", [(0, outer.version)]) for at in samples])
                content = content if self.path == SAMPLES else b"{}"
                self.send_response(outer.status.get(self.path, lambda: 200)())
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self.alive = False
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def start(self, taken: Any = ()) -> None:
        self.calls.append("start")
        self.alive, self.dead_at = True, ""

    def wait_ready(self) -> None: ...

    def healthy(self) -> bool:
        return self.alive and self.dead_at not in self.calls

    def stop(self) -> None:
        self.alive = False

    def log_end(self) -> str:
        return "its log"


class Sender:
    """In place of the trainer's ranks: nothing travels."""

    num_sources, world_size = 1, 2
    failed = ""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.closed = threading.Event()

    def open_rendezvous(self, host: str) -> str:
        return "1"

    def broadcast_rendezvous(self) -> None: ...
    def join_group(self) -> None: ...

    def close(self) -> None:
        self.closed.set()

    def send_shards(self, cancelled: Any) -> None:
        assert not cancelled()
        self.calls.append("shards are sent")

    def finish_update(self, arrived: bool) -> str:
        self.calls.append(f"arrived: {arrived}")
        return self.failed


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    made = StandIn()
    yield made
    made.http.shutdown()
    made.http.server_close()


def fleet_of(stand_in: StandIn, placement: str, tmp_path: Path) -> Fleet:
    config = ServerConfig(placement=placement, max_num_seqs=2)
    fleet = Fleet(config, model_dir=tmp_path, dtype="float32", stop_token_ids=[2], log_dir=tmp_path)
    fleet._servers = [stand_in]  # type: ignore[list-item]
    fleet.start()
    return fleet


def sample(fleet: Fleet) -> None:
    fleet.generate([(1, 2)], n=1, temperature=1.0, max_new_tokens=1, seed=0)


UPDATE = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
SLEEP, WEIGHTS, CACHE = "/sleep?level=2", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"


def served(stand_in: StandIn) -> list[str]:
    """Requests since the last call, without what is sent beside them."""
    calls = [call for call in stand_in.calls if call.startswith("/") or call == "start"]
    stand_in.calls.clear()
    return calls


def test_colocated_servers_sleep_and_wake_around_every_update(stand_in: StandIn, tmp_path: Path) -> None:
    fleet = fleet_of(stand_in, "colocated", tmp_path)
    assert served(stand_in) == ["start", SLEEP]
    sender: Any = Sender(stand_in.calls)
    for step in (1, 2):
        fleet.update_weights_from_shards(WeightsVersion(step), sender)
        join = ["/init_weight_transfer_engine"] if step == 1 else []
        assert served(stand_in) == [*join, WEIGHTS, *UPDATE]  # neither paused nor resumed: sleep and waking do that
        with pytest.raises(RuntimeError, match=rf"{stand_in.url} is asleep: its kv_cache are not on the GPU"):
            sample(fleet)
        fleet.wake_up()
        fleet.wake_up()
        sample(fleet)
        assert served(stand_in) == [CACHE, SAMPLES]
        fleet.sleep()
        assert served(stand_in) == [SLEEP]
        with pytest.raises(RuntimeError, match="do not have the current weights"):
            sample(fleet)
    fleet.stop()


def test_other_servers_are_paused_and_never_sleep(stand_in: StandIn, tmp_path: Path) -> None:
    fleet = fleet_of(stand_in, "local", tmp_path)
    sender: Any = Sender(stand_in.calls)
    fleet.sleep()
    fleet.update_weights_from_shards(WeightsVersion(1), sender)
    fleet.wake_up()
    sample(fleet)
    join = "/init_weight_transfer_engine"
    assert served(stand_in) == ["start", join, "/pause?mode=keep", *UPDATE, "/resume", SAMPLES]
    fleet.stop()


@pytest.mark.parametrize("dies_at", [SLEEP, CACHE])
def test_a_server_that_dies_while_it_changes_over_is_revived_asleep(dies_at: str, stand_in: StandIn, tmp_path: Path) -> None:
    fleet = fleet_of(stand_in, "colocated", tmp_path)
    sender: Any = Sender(stand_in.calls)
    fleet.update_weights_from_shards(WeightsVersion(1), sender)
    stand_in.calls.clear()
    stand_in.dead_at = dies_at
    with pytest.raises(ServerDied, match=r"rollout server gone: (?s:.*)its log"):
        fleet.wake_up() if dies_at == CACHE else fleet.sleep()
    stand_in.dead_at = "never"
    stand_in.alive = False
    stand_in.calls.clear()
    assert fleet.revive()
    assert served(stand_in) == ["start", SLEEP]
    fleet.update_weights_from_shards(WeightsVersion(1), sender)
    assert served(stand_in) == ["/init_weight_transfer_engine", WEIGHTS, *UPDATE]
    fleet.stop()


def test_a_server_that_only_seemed_dead_is_put_to_sleep_before_it_gets_weights(stand_in: StandIn, tmp_path: Path) -> None:
    fleet = fleet_of(stand_in, "colocated", tmp_path)
    sender: Any = Sender(stand_in.calls)
    fleet.update_weights_from_shards(WeightsVersion(1), sender)
    fleet.wake_up()
    stand_in.dead_at = SAMPLES
    with pytest.raises(ServerDied):
        sample(fleet)
    stand_in.dead_at = "never"
    stand_in.calls.clear()
    assert not fleet.revive()
    assert served(stand_in) == [SLEEP]
    fleet.update_weights_from_shards(WeightsVersion(1), sender)
    assert served(stand_in) == [WEIGHTS, *UPDATE]
    fleet.stop()


def test_the_error_says_which_other_rank_of_the_trainer_failed(stand_in: StandIn, tmp_path: Path) -> None:
    fleet = fleet_of(stand_in, "local", tmp_path)
    sender: Any = Sender(stand_in.calls)
    sender.failed = "The first other trainer rank to fail was rank 3: no room"
    stand_in.status["/update_weights"] = lambda: 500
    with pytest.raises(RuntimeError, match=r"(?s)weights 1 did not reach .*status 500.*\. The first .* was rank 3: no room"):
        fleet.update_weights_from_shards(WeightsVersion(1), sender)
    assert stand_in.calls[-1] == "arrived: False"


def test_the_trainer_leaves_when_one_server_fails_so_that_the_others_end(stand_in: StandIn) -> None:
    """Over NCCL the other server's worker waits for a trainer rank that waits for the first's, and neither would notice."""
    other = StandIn()
    sender: Any = Sender([])
    stand_in.status["/update_weights"] = lambda: 500
    other.status["/update_weights"] = lambda: 503 if sender.closed.wait(TIMEOUT_S) else 200
    clients = [Client(server.url, "key", TIMEOUT_S) for server in (stand_in, other)]
    sync = ShardSync(clients, host="127.0.0.1", tp=1, timeout_s=TIMEOUT_S)
    with pytest.raises(RuntimeError, match=rf"{stand_in.url}/update_weights: status 500(?s:.*){other.url}\S*: status 503"):
        sync.update_weights(WeightsVersion(1), sender)
    sync.close()
    other.http.shutdown()
    other.http.server_close()


def test_a_sleeping_server_is_not_asked_for_anything(stand_in: StandIn) -> None:
    client = Client(stand_in.url, "key", TIMEOUT_S)
    client.sleep()
    arguments: dict[str, Any] = {"n": 1, "temperature": 1.0, "max_new_tokens": 1, "seed": 0, "stop_token_ids": [2]}
    stand_in.calls.clear()
    for ask in (
        lambda: draw_group(client, (1,), **arguments, version=WeightsVersion(0)),
        lambda: client.prompt_logprobs((1, 2)),
    ):
        with pytest.raises(RuntimeError, match="asleep: its kv_cache and weights are not on the GPU"):
            ask()
    assert stand_in.calls == []
    client.close()


def test_only_colocated_servers_are_started_with_sleep_mode(tmp_path: Path) -> None:
    for placement in ("local", "colocated"):
        config = ServerConfig(placement=placement)
        server = Server(config, model_dir=tmp_path, dtype="float32", cores="0", key="k", log=tmp_path / "log")
        assert ("--enable-sleep-mode" in server.command(on_gpu=True)) == (placement == "colocated")


def test_servers_get_their_gpus_in_order_by_the_names_that_the_trainer_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServerConfig(tp=2, count=2, placement="colocated")
    fleet = Fleet(config, model_dir=tmp_path, dtype="float32", stop_token_ids=[2], log_dir=tmp_path, first_gpu=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9,4,5,6,7")
    seen = [server.environment(on_gpu=True)["CUDA_VISIBLE_DEVICES"] for server in fleet._servers]  # type: ignore[union-attr]
    assert seen == ["4,5", "6,7"]
    assert visible_gpus(range(2, 4), None) == "2,3"
    with pytest.raises(ValueError, match=r"run on GPU 3, but CUDA_VISIBLE_DEVICES = 0,1 shows 2"):
        visible_gpus(range(2, 4), "0,1")
