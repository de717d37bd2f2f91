"""Servers that share the trainer's GPUs, and others, as the fleet drives them: which requests each gets, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.sampler.fleet.sync import WeightSync
from tepo_megatron.sampler.protocol import ServerDied
from tepo_megatron.sampler.vllm.client import Client
from tepo_megatron.sampler.vllm.wire import SAMPLES
from tests.support.faulty_server import FaultyServer, Sender, fleet_of
from tests.support.programs import TIMEOUT_S

JOIN, UPDATE = "/init_weight_transfer_engine", ["/start_weight_update", "/update_weights", "/finish_weight_update"]
UPDATE += ["/reset_prefix_cache"]
SLEEP, WEIGHTS, CACHE = "/sleep?level=2", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"


@pytest.fixture
def fleet(server: FaultyServer, tmp_path: Path) -> Iterator[Fleet]:
    """One colocated server."""
    with fleet_of([server], tmp_path, placement="colocated") as (made, _):
        yield made


@pytest.fixture
def sender(server: FaultyServer) -> Any:
    return Sender(server.calls)


def sample(fleet: Fleet) -> None:
    fleet.generate([(1, 2)], n=1, temperature=1.0, max_new_tokens=2, seed=0)


def served(server: FaultyServer) -> list[str]:
    """Requests since the last call, without what is sent beside them."""
    calls = [call for call in server.calls if call.startswith("/")]
    server.calls.clear()
    return calls


def test_colocated_servers_sleep_and_wake_around_every_update(server: FaultyServer, fleet: Fleet, sender: Any) -> None:
    assert served(server) == [SLEEP]
    for step in (1, 2):
        fleet.update_weights_from_shards(WeightsVersion(step), sender)
        # neither paused nor resumed: sleep and waking do that
        assert served(server) == [*([JOIN] if step == 1 else []), WEIGHTS, *UPDATE]
        with pytest.raises(RuntimeError, match=rf"{server.url} is asleep: its kv_cache are not on the GPU"):
            sample(fleet)
        fleet.wake_up()
        fleet.wake_up()
        sample(fleet)
        assert served(server) == [CACHE, SAMPLES]
        fleet.sleep()
        assert served(server) == [SLEEP]
        with pytest.raises(RuntimeError, match="do not have the current weights"):
            sample(fleet)


def test_other_servers_are_paused_and_never_sleep(server: FaultyServer, sender: Any, tmp_path: Path) -> None:
    with fleet_of([server], tmp_path) as (fleet, _):
        fleet.sleep()
        fleet.update_weights_from_shards(WeightsVersion(1), sender)
        fleet.wake_up()
        sample(fleet)
        assert served(server) == [JOIN, "/pause?mode=keep", *UPDATE, "/resume", SAMPLES]


@pytest.mark.parametrize("dies_at", [SLEEP, CACHE])
def test_a_server_that_dies_while_it_changes_over_is_revived_asleep(
    dies_at: str, server: FaultyServer, fleet: Fleet, sender: Any
) -> None:
    fleet.update_weights_from_shards(WeightsVersion(1), sender)
    server.kills = {dies_at}
    with pytest.raises(ServerDied, match=r"rollout server gone: (?s:.*)the end of its log"):
        fleet.wake_up() if dies_at == CACHE else fleet.sleep()
    server.kills.clear()
    server.calls.clear()
    assert fleet.revive()
    assert (server.starts, served(server)) == (2, [SLEEP])
    fleet.update_weights_from_shards(WeightsVersion(1), sender)
    assert served(server) == [JOIN, WEIGHTS, *UPDATE]


def test_a_server_that_only_seemed_dead_is_put_to_sleep_before_it_gets_weights(
    server: FaultyServer, fleet: Fleet, sender: Any
) -> None:
    fleet.update_weights_from_shards(WeightsVersion(1), sender)
    fleet.wake_up()
    server.kills = {SAMPLES}
    with pytest.raises(ServerDied):
        sample(fleet)
    server.kills.clear()
    server.alive = True
    server.calls.clear()
    assert not fleet.revive()
    assert served(server) == [SLEEP]
    fleet.update_weights_from_shards(WeightsVersion(1), sender)
    assert served(server) == [WEIGHTS, *UPDATE]


def test_the_error_says_which_other_rank_of_the_trainer_failed(server: FaultyServer, fleet: Fleet, sender: Any) -> None:
    sender.failed = "The first other trainer rank to fail was rank 3: no room"
    server.refuses = {"/update_weights"}
    with pytest.raises(RuntimeError, match=r"(?s)weights 1 did not reach .*status 500.*\. The first .* was rank 3: no room"):
        fleet.update_weights_from_shards(WeightsVersion(1), sender)
    assert server.calls[-1] == "arrived: False"


def test_the_trainer_leaves_when_one_server_fails_so_that_the_others_end(server: FaultyServer, sender: Any) -> None:
    """Over NCCL the other server's worker waits for a trainer rank that waits for the first's, and neither would notice."""
    other = FaultyServer()
    server.refuses = other.refuses = other.hangs = {"/update_weights"}
    other.released = sender.closed
    config = ServerConfig(transfer_timeout_s=TIMEOUT_S, request_timeout_s=TIMEOUT_S)
    sync = WeightSync([Client(each.url, "key", TIMEOUT_S) for each in (server, other)], config)
    with pytest.raises(RuntimeError, match=rf"{server.url}/update_weights: status 500(?s:.*){other.url}\S*: status 500"):
        sync.update_from_shards(WeightsVersion(1), sender)
    sync.close()
    other.close()
