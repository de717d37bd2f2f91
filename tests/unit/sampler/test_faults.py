"""Servers that answer wrongly, hang, are slow or vanish: each has one defined end, and no wrong answer reaches the trainer."""

import json
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.runtime.machine import Machine
from tepo_megatron.runtime.preemption import StopSignals
from tepo_megatron.sampler.fleet import server_pool
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.sampler.protocol import ServerDied
from tepo_megatron.sampler.sampling import Sample as Request
from tepo_megatron.sampler.vllm.client import GENERATE, Client, ServerGone
from tepo_megatron.sampler.vllm.wire import READ_BACK, SAMPLES, BadAnswer, head_frame, read_responses, response_frame
from tests.support.faulty_server import VOCABULARY, Behaviour, FaultyServer, Sample, Sender, answer_well, choice, fleet_of
from tests.support.processes import eventually
from tests.support.programs import TIMEOUT_S

Groups = list[list[Response]]
Servers = list[FaultyServer]
PROMPTS = [(1, 5), (1, 6, 7), (1,), (1, 9)]
SHORT_S = 3.0
"""For who hangs. The others answer in milliseconds, and in far less than this on a machine that is ten times slower."""


def sample(fleet: Fleet) -> Groups:
    return fleet.generate(PROMPTS, n=2, temperature=1.0, max_new_tokens=4, seed=3)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Groups:
    server = FaultyServer()
    with fleet_of([server], tmp_path_factory.mktemp("good")) as (fleet, _):
        found = sample(fleet)
    server.close()
    return found


# -- wrong answers


def spoilt(change: Callable[[list[Sample]], Any]) -> Behaviour:
    def behave(server: FaultyServer, samples: list[Sample]) -> tuple[int, bytes]:
        changed = change(samples)
        return answer_well(server, samples if changed is None else changed)

    return behave


with_nan = spoilt(lambda samples: samples[0].update(logprobs=[-0.5, float("nan")]))


def failing(server: FaultyServer, samples: list[Sample]) -> tuple[int, bytes]:
    failure = head_frame({"error": "out of memory", "status": 500})
    return 200, b"".join([*(response_frame(**each) for each in samples[:-1]), failure])


# A request that is sent again asks for what has not come: these answer one for a single sample as wrongly as one for two.
FAULTS: dict[str, tuple[Behaviour, str]] = {
    "a log-prob of NaN": (with_nan, "log-prob of response token 1 is nan"),
    "a response too few": (spoilt(lambda samples: samples[:-1]), r"returned (1 responses of 2|0 responses of 1) that"),
    "status 500": (lambda server, samples: (500, b'{"error": {"message": "out of memory"}}'), "status 500: out of memory"),
    "a failure in mid-stream": (failing, "status 500: out of memory"),
    "a connection that breaks off": (lambda server, samples: None, "peer closed connection"),
}
"""Others: test_wire.py and test_client.py."""


def first_two(behave: Behaviour) -> Behaviour:
    """The first two requests for whole groups are answered so. One that is sent again for the rest of a group is not: it may be
    faster than another's first, and a fault behind its last response would repeat nothing.
    """
    asked = count()
    return lambda server, samples: (
        behave(server, samples) if len(samples) == 2 and next(asked) < 2 else answer_well(server, samples)
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_answer_is_asked_for_again_and_then_ends_the_server_with_the_first_cause(
    name: str, server: FaultyServer, expected: Groups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave, said = FAULTS[name]
    monkeypatch.setattr("tepo_megatron.sampler.fleet.stream.FIRST_PAUSE_S", 0.0)
    server.always = first_two(behave)
    with fleet_of([server], tmp_path, max_retries=2, max_restarts=1) as (fleet, _):
        assert sample(fleet) == expected  # the same draws, by the same seeds
        assert fleet.figures() == {"servers/restarts": 0, "servers/timeouts": 0, "requests/retried": 2}
        assert len(set(server.seeds)) == 2 * len(PROMPTS)
        server.always = behave
        with pytest.raises(ServerDied, match=server.url) as died:
            sample(fleet)
        assert re.search(said, str(died.value))
        assert not server.alive
        assert fleet.revive()
        assert server.starts == 2
        with pytest.raises(RuntimeError, match="do not have the current weights"):
            sample(fleet)
        fleet._version = WeightsVersion(0)
        with pytest.raises(ServerDied):
            sample(fleet)
        too_often = r"died 2 times; rollout.server.max_restarts = 1. The first failure was: "
        with pytest.raises(RuntimeError, match=too_often) as last:
            fleet.revive()
        assert re.search(said, str(last.value))
        assert "the end of its log" in str(last.value)


def be_well(server: FaultyServer) -> None:
    """From its second start on."""
    if server.starts > 1:
        server.always = answer_well


def test_of_two_servers_one_that_answers_wrongly_is_replaced(servers: Servers, expected: Groups, tmp_path: Path) -> None:
    good, bad = servers
    bad.always, bad.after_start = with_nan, be_well
    with fleet_of(servers, tmp_path, max_retries=0) as (fleet, reports):
        with fleet._announced(WeightsVersion(0)):
            pass  # from an update on, the model's folder has other weights
        assert sample(fleet) == expected
        assert [bad.url in report and "its requests go to the other servers" in report for report in reports] == [True]
        assert sample(fleet) == expected  # by the good one alone: the other has no weights yet
        assert fleet.weights_version == WeightsVersion(0)
        with fleet._announced(WeightsVersion(0)):  # as the next update does
            fleet._take_back()
            assert (good.starts, bad.starts) == (1, 2)
            assert [client.url for client in fleet.sampling().values()] == [good.url], "a server without weights is not asked"
        assert [client.url for client in fleet.sampling().values()] == [good.url, bad.url]
        assert fleet.weights_version is None
        fleet._version = WeightsVersion(0)
        asked = len(bad.seeds)
        assert sample(fleet) == expected
        assert len(bad.seeds) > asked
        assert fleet.figures()["servers/restarts"] == 1


def test_without_updates_a_server_that_was_started_again_is_asked_again(servers: Servers, tmp_path: Path) -> None:
    """A teacher's servers and an evaluation's have the right weights as soon as they are there."""
    bad = servers[1]
    bad.always, bad.after_start = with_nan, be_well
    with fleet_of(servers, tmp_path, max_retries=0, max_restarts=9) as (fleet, _):
        drawn = sample(fleet)
        assert eventually(lambda: len(fleet.sampling()) == 2)
        asked = len(bad.seeds)
        assert sample(fleet) == drawn
        assert len(bad.seeds) > asked
        fleet._end()  # all died at once: then, too, the folder's weights are the right ones
        assert fleet.revive()
        fleet.lose(1, fleet._clients[1], ServerGone("gone"))
        assert eventually(lambda: not fleet._away)


def test_an_update_waits_for_two_replacements_of_which_the_first_is_late(servers: Servers, tmp_path: Path) -> None:
    late, second, good = *servers, FaultyServer()
    gate = threading.Event()
    for bad in (late, second):
        bad.always = with_nan

    def wait(server: FaultyServer) -> None:
        if server.starts > 1:
            gate.wait(TIMEOUT_S)

    late.after_start = wait
    with fleet_of([late, second, good], tmp_path, max_retries=0) as (fleet, _), ThreadPoolExecutor(1) as pool:
        sample(fleet)

        def update() -> None:
            with fleet._changing, fleet._announced(WeightsVersion(1)):
                gate.set()
                fleet._take_back()

        pool.submit(update).result(TIMEOUT_S)
        assert len(fleet.sampling()) == 3
    good.close()


def test_a_canary_asks_no_server_that_waits_for_an_update(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "read_back", Client.resume)  # any request
    good, bad = servers
    bad.always = with_nan
    with fleet_of(servers, tmp_path, max_retries=0) as (fleet, _):
        with fleet._announced(WeightsVersion(0)):
            pass
        sample(fleet)
        assert list(fleet.read_back()) == [good.url]
        good.always, good.alive = with_nan, False
        with pytest.raises(ServerDied):
            sample(fleet)
        with pytest.raises(ServerDied, match="no server is left to ask"):
            fleet.read_back()


@pytest.mark.parametrize("servers_left", [0, 1])
@pytest.mark.parametrize("first", ["the stream", "the canary"])
def test_a_death_that_a_stream_sees_too_is_a_servers_death_for_the_canary(
    first: str, servers_left: int, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever order: before the canary's question fails, or while its server is stopped for it."""
    gone = ServerGone("the connection was closed")
    with fleet_of(servers[: 1 + servers_left], tmp_path) as (fleet, _), ThreadPoolExecutor(1) as stream:
        with fleet._announced(WeightsVersion(0)):
            pass
        bad = fleet._clients[0]

        def lose() -> None:
            try:
                fleet.lose(0, bad, gone)
            except ServerDied:
                assert not servers_left

        def read_back(client: Client) -> None:
            if client is bad:
                if first == "the stream":
                    stream.submit(lose).result(TIMEOUT_S)
                raise gone

        monkeypatch.setattr(Client, "read_back", read_back)
        stop = servers[0].stop

        def stop_late() -> None:
            if first == "the canary" and 0 not in fleet._lost:
                stream.submit(lose).result(TIMEOUT_S)
            stop()

        monkeypatch.setattr(servers[0], "stop", stop_late)
        if first == "the stream" and servers_left:
            assert list(fleet.read_back()) == [servers[1].url]
        else:
            with pytest.raises(ServerDied):
                fleet.read_back()


def test_a_stop_signal_ends_the_wait_for_a_server_that_starts_again(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run would not save within train.grace_s."""
    gate = threading.Event()
    servers[0].always = with_nan
    servers[0].after_start = lambda server: server.starts > 1 and gate.wait(TIMEOUT_S)
    with fleet_of(servers, tmp_path, max_retries=0) as (fleet, _):
        sample(fleet)
        monkeypatch.setattr(StopSignals.current(), "requested", signal.SIGTERM)
        with fleet._changing, pytest.raises(ServerDied, match="a stop signal came while a server was started again"):
            fleet._take_back()
        gate.set()


def test_other_weights_and_refusals_are_neither_repeated_nor_a_servers_death(server: FaultyServer, tmp_path: Path) -> None:
    with fleet_of([server], tmp_path) as (fleet, _):
        for behave, said in (
            (spoilt(lambda samples: samples[0].update(versions=[(0, "9:x")])), "a response with weights 9:x"),
            (lambda server, samples: (400, b'{"error": {"message": "the prompt is too long"}}'), "the prompt is too long"),
        ):
            server.faults = [behave] * len(PROMPTS)
            with pytest.raises(RuntimeError, match=said) as refused:
                sample(fleet)
            assert not isinstance(refused.value, ServerDied)
            server.faults = []
        assert fleet.figures()["requests/retried"] == 0
        assert server.alive


KEYS = st.sampled_from(["sample", "arrays", "ids", "logprobs", "finish_reason", "versions", "end", "error", "x"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=5) | st.just("4:d"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100)
@given(st.data())
def test_whatever_an_answer_is_changed_to_it_is_refused_or_right(data: st.DataObject) -> None:
    """A value of a head, or any bytes."""
    frames = [response_frame(**choice([1, 5], seed, "4:d") | {"sample": seed - 3}) for seed in (3, 4)]
    if data.draw(st.booleans()):
        size = int.from_bytes(frames[1][:4], "little")
        head = json.loads(frames[1][4 : 4 + size])
        head[data.draw(KEYS)] = data.draw(json_values)
        frames[1] = head_frame(head) + frames[1][4 + size :]
        stream = b"".join([*frames, head_frame({"end": 2})])
    else:
        whole = b"".join([*frames, head_frame({"end": 2})])
        at = data.draw(st.integers(0, len(whole)))
        stream = whole[:at] + data.draw(st.binary(max_size=8)) + whole[at + data.draw(st.integers(0, 8)) :]
    asked = {index: Request(index, 0, 4) for index in (0, 1)}
    try:
        found = dict(read_responses([stream], asked, lambda: [WeightsVersion(4, "d")], vocab_size=VOCABULARY))
    except BadAnswer:
        return
    assert len(found) == 2
    for response in found.values():
        assert 1 <= len(response.response_ids) == len(response.logprobs) <= 4
        assert all(0 <= token < VOCABULARY for token in response.response_ids.tolist())
        assert all(-1e30 < value <= 1e-3 for value in response.logprobs.tolist())


# -- silence


def test_a_server_that_hangs_is_lost_and_its_requests_go_to_the_other(
    servers: Servers, expected: Groups, tmp_path: Path
) -> None:
    """It answers neither samples nor the question for its progress."""
    _, bad = servers
    bad.hangs = {SAMPLES, "/health"}
    bad.after_start = lambda server: server.hangs.clear() if server.starts > 1 else None
    with fleet_of(servers, tmp_path, request_timeout_s=SHORT_S) as (fleet, reports):
        assert sample(fleet) == expected
        figures = fleet.figures()
        assert figures["servers/timeouts"] == 1
        assert figures["requests/retried"] == 2
        assert "no new token of any request within 3 s (rollout.server.request_timeout_s)" in reports[0]
        fleet._take_back()
        assert [server.starts for server in servers] == [1, 2]


@pytest.mark.slow
def test_a_slow_server_that_makes_tokens_is_left_alone(server: FaultyServer, expected: Groups, tmp_path: Path) -> None:
    """By samples, and by a canary, since vLLM's priority passes no running request."""

    def slow(server: FaultyServer, samples: list[Sample]) -> tuple[int, bytes]:
        while (passed := time.monotonic() - start) < 2 * SHORT_S or (len(moves) < 2 and passed < 60):
            server.tokens += 1
            time.sleep(0.05)
        return spoilt(lambda samples: samples[0].update(cached=0))(server, samples)

    server.always, moves, start = slow, list[int](), time.monotonic()
    with fleet_of([server], tmp_path, request_timeout_s=SHORT_S) as (fleet, _), ThreadPoolExecutor(1) as pool:
        canary = pool.submit(fleet.read_through_cache, (1, 5), 4)
        options: Any = {"n": 2, "temperature": 1.0, "max_new_tokens": 4, "seed": 3}
        assert fleet.generate(PROMPTS, on_move=lambda: moves.append(server.tokens), **options) == expected
        assert list(canary.result(TIMEOUT_S)) == [server.url]
        assert len(moves) > 1  # the run's heartbeat is told of tokens, long before a prompt is done
        assert set(fleet.figures().values()) == {0}


PAUSE, UPDATE, FINISH, RESET = "/pause?mode=keep", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"


@pytest.mark.parametrize(
    ("hangs", "refuses", "timeout_s", "named"),
    [
        (PAUSE, "", SHORT_S, ""),
        (UPDATE, "", SHORT_S, ""),
        # An engine whose worker is gone refuses for a moment, in which its server is healthy. Later the server holds the
        # request, and says to others that its engine is dead.
        ("", PAUSE, 3600.0, PAUSE),
        ("", UPDATE, 3600.0, UPDATE),
        ("", FINISH, 3600.0, FINISH),
        (PAUSE, "/health", 3600.0, "/health: status 500"),
        (RESET, "/health", 3600.0, "/health: status 500"),
    ],
)
def test_a_server_that_hangs_or_fails_in_an_update_counts_as_dead(
    hangs: str, refuses: str, timeout_s: float, named: str, servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tepo_megatron.sampler.fleet.sync.LOOK_S", 0.05)
    servers[1].hangs, servers[1].refuses = {hangs}, {refuses}
    with fleet_of(servers, tmp_path, request_timeout_s=timeout_s, transfer_timeout_s=timeout_s) as (fleet, _):
        sender: Any = Sender([])
        sender.failed = "rank 3 saw a connection close"
        with pytest.raises(ServerDied, match=rf"weights 1 did not reach the (?s:.*){servers[1].url}{re.escape(named)}"):
            fleet.update_weights_from_shards(WeightsVersion(1), sender)
        assert sender.calls[-1] == "arrived: False"
        assert not any(server.alive for server in servers)  # the others have half of the new weights
        servers[1].hangs, servers[1].refuses = set(), set()
        fleet.config = fleet.config.model_copy(update={"request_timeout_s": 60.0, "transfer_timeout_s": 60.0})
        assert fleet.revive()
        fleet.update_weights_from_shards(WeightsVersion(1), sender)
        assert fleet.weights_version == WeightsVersion(1)


def test_a_failed_update_counts_as_one_death_although_all_servers_restart(servers: Servers, tmp_path: Path) -> None:
    with fleet_of(servers, tmp_path, max_restarts=1) as (fleet, _):
        sender: Any = Sender([])
        servers[1].kills = {UPDATE}
        with pytest.raises(ServerDied, match="weights 1 did not reach the rollout servers"):
            fleet.update_weights_from_shards(WeightsVersion(1), sender)
        servers[1].kills = set()
        assert fleet.revive()
        assert fleet.figures()["servers/restarts"] == 2
        fleet.update_weights_from_shards(WeightsVersion(1), sender)
        servers[0].alive = False
        with pytest.raises(RuntimeError, match=r"died 2 times; rollout.server.max_restarts = 1"):
            fleet.revive()


def test_a_server_that_hangs_before_it_has_joined_counts_as_dead(servers: Servers, tmp_path: Path) -> None:
    class Waiting(Sender):
        def join_group(self) -> None:
            raise RuntimeError("2 of 3 members of the weight-transfer group joined within 1 s")

    servers[0].hangs = {"/init_weight_transfer_engine"}
    with fleet_of(servers, tmp_path, request_timeout_s=60.0, transfer_timeout_s=SHORT_S) as (fleet, _):
        sender: Any = Waiting([])
        with pytest.raises(ServerDied, match=rf"{servers[0].url} gave no answer, also when.*2 of 3 members"):
            fleet.update_weights_from_shards(WeightsVersion(1), sender)
        assert sender.closed.is_set()


def test_a_canary_that_hangs_or_is_garbage_counts_as_a_servers_death(server: FaultyServer, tmp_path: Path) -> None:
    with fleet_of([server], tmp_path, max_retries=1, max_restarts=9) as (fleet, _):
        server.sample = lambda body: (200, b"{}")  # type: ignore[method-assign]
        with pytest.raises(ServerDied, match="something else than the log-probs of the prompt"):
            fleet.prompt_logprobs((1, 2, 3))
        assert fleet.figures()["requests/retried"] == 1
        fleet.revive()
        fleet.config = fleet.config.model_copy(update={"request_timeout_s": 0.5})
        for route, ask in (
            (GENERATE, lambda: fleet.prompt_logprobs((1, 2, 3))),
            (SAMPLES, lambda: fleet.read_through_cache((1, 2), 4)),
            (READ_BACK, fleet.read_back),
        ):
            server.hangs, fleet._version = {route}, WeightsVersion(0)
            with pytest.raises(ServerDied, match=r"no new token of any request within 0\.5 s"):
                ask()
            assert not server.alive
            assert fleet.revive()


# -- too few threads


def slow(server: FaultyServer, samples: list[Sample]) -> tuple[int, bytes]:
    time.sleep(0.2)
    return answer_well(server, samples)


def allow_no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name.startswith("rollout"):
            raise RuntimeError("can't start new thread")  # as CPython does at a limit of processes
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)


def test_without_new_threads_requests_wait_and_no_server_is_lost(
    servers: Servers, expected: Groups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for server in servers:
        server.always = slow
    with fleet_of(servers, tmp_path) as (fleet, reports):
        allow_no_connections(monkeypatch)
        assert sample(fleet) == expected
        assert set(fleet.figures().values()) == {0}
        assert ["can't start new thread" in report and "ulimit -u" in report for report in reports] == [True]


def test_where_no_thread_can_be_started_the_limit_is_named(
    server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_no_connections(monkeypatch)
    refused = pytest.raises(RuntimeError, match=rf"{server.url}: can't start new thread; raise .*ulimit -u")
    with refused, fleet_of([server], tmp_path) as (fleet, _):
        sample(fleet)


def test_connections_leave_other_work_half_of_the_processes(
    servers: Servers, expected: Groups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_pool, "this_machine", lambda: Machine(processes=4))
    most, present, lock = 0, [0, 0], threading.Lock()

    def count_requests(server: FaultyServer, samples: list[Sample]) -> tuple[int, bytes]:
        nonlocal most
        index = servers.index(server)
        with lock:
            present[index] += 1
            most = max(most, *present)
        result = slow(server, samples)
        with lock:
            present[index] -= 1
        return result

    for server in servers:
        server.always = count_requests
    with fleet_of(servers, tmp_path) as (fleet, _):
        assert sample(fleet) == expected
    assert most == 1
