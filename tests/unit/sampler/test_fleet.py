"""Streams of samples, and servers that share the trainer's GPUs: which requests each server gets, in which order."""

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.sampler.fleet.stream import FleetStream
from tepo_megatron.sampler.fleet.sync import WeightSync
from tepo_megatron.sampler.protocol import ServerDied
from tepo_megatron.sampler.sampling import Sample, Sampling, prompt_seed
from tepo_megatron.sampler.vllm.client import Client, ServerFault, ServerGone
from tepo_megatron.sampler.vllm.wire import SAMPLES
from tests.support.faulty_server import FaultyServer, Sender, answer, answer_well, draw_group, fleet_of
from tests.support.processes import eventually
from tests.support.programs import TIMEOUT_S

SAMPLING = Sampling(1.0, 4)


def wait_for_calls(count: int, *servers: FaultyServer) -> None:
    assert eventually(lambda: sum(len(server.calls) for server in servers) >= count)


def drawn(stream: FleetStream) -> dict[tuple[Any, int], Response]:
    return {(key, index): response for key, index, response in stream}


def test_samples_asked_for_while_others_come_are_those_of_one_call(servers: list[FaultyServer], tmp_path: Path) -> None:
    prompts = [(1, 5), (1, 6, 7), (1,), (1, 9)]
    with fleet_of(servers, tmp_path) as (fleet, _):
        expected = fleet.generate(prompts, n=2, temperature=1.0, max_new_tokens=4, seed=3)
        servers[0].seeds.clear()
        found: dict[Any, Response] = {}
        with fleet.sample_stream(SAMPLING) as stream:
            stream.submit(0, prompts[0], prompt_seed(3, 0), 2)
            for later in (1, 2, 3, None):
                key, index, response = stream.next(None)
                found[key, index] = response
                if later is not None:
                    stream.submit(later, prompts[later], prompt_seed(3, later), 2)
            assert stream.unfinished == 4
            found |= drawn(stream)
            assert (stream.unfinished, stream.next(None), stream.next(0.0)) == (0, None, None)
            stream.submit("again", prompts[1], prompt_seed(3, 1), 2, only=[1])
            assert stream.next(None) == ("again", 1, expected[1][1])
        assert [[found[at, index] for index in range(2)] for at in range(4)] == expected


class Counted(dict[int, Sample]):
    asked = 0

    def __len__(self) -> int:
        Counted.asked += 1
        return super().__len__()


def test_a_response_costs_no_look_at_all_requests_that_wait(server: FaultyServer, tmp_path: Path) -> None:
    server.hangs = {SAMPLES}
    with fleet_of([server], tmp_path, max_num_seqs=1) as (fleet, _), fleet.sample_stream(SAMPLING) as stream:
        for key in range(1000):
            stream.submit(key, (1, 2), 7)
        for request in stream._waiting:
            request.samples = Counted(request.samples)
        for _ in range(100):
            assert stream.next(0.0) is None
        stream._ready.extend((key, 0, Response((1,), (-0.5,), "stop", WeightsVersion(0))) for key in range(100))
        assert [key for key, _, _ in islice(stream, 100)] == [*range(100)]
        assert 0 < Counted.asked <= 1000
        assert stream.unfinished == 1000


def test_a_server_that_has_its_share_gets_no_more_until_it_has_room(servers: list[FaultyServer], tmp_path: Path) -> None:
    """One that is stopped costs its own requests and nothing else: what waits goes to the other."""
    (_, stopped) = servers
    stopped.hangs = {SAMPLES}
    with fleet_of(servers, tmp_path, max_num_seqs=2) as (fleet, _), fleet.sample_stream(SAMPLING) as stream:
        for key in range(20):
            stream.submit(key, (1, key), 7, 2)
        found: dict[Any, Response] = {}
        while len(found) < 36:
            name, index, each = stream.next(None)
            found[name, index] = each
        assert stream.next(0.0) is None
        wait_for_calls(2, stopped)
        assert (stream.unfinished, len(stopped.calls)) == (4, 2)  # twice what it draws at once
        stopped.hangs.clear()
        stopped.released.set()
        found |= drawn(stream)
        assert len(found) == 40
        assert fleet.figures()["requests/retried"] == 0


def test_a_request_goes_to_its_episodes_server_or_the_least_busy(servers: list[FaultyServer], tmp_path: Path) -> None:
    servers[0].hangs = servers[1].hangs = {SAMPLES}
    with fleet_of(servers, tmp_path, max_num_seqs=64) as (fleet, _), fleet.sample_stream(SAMPLING) as stream:
        for key, length in enumerate((50, 3, 3, 3, 3)):
            stream.submit(key, [1] * length, 7, home=key)
        stream.submit(5, [1] * 3, 7, home=0)
        wait_for_calls(6, *servers)
        assert [len(server.calls) for server in servers] == [2, 4]
        stream.leave(0)
        stream.submit(6, [1] * 3, 7, home=0)
        wait_for_calls(7, *servers)
        assert [len(server.calls) for server in servers] == [2, 5]
        for server in servers:
            server.released.set()
        assert len(drawn(stream)) == 7


def test_a_score_is_asked_of_the_server_with_the_fewest_and_again_after_a_fault(
    servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, faults, gate = list[str](), list[ServerFault](), threading.Event()

    def score(client: Client, tokens: tuple[int, ...], k: int) -> Any:
        asked.append(client.url)
        assert k or gate.wait(TIMEOUT_S)
        if faults:
            raise faults.pop()
        return tokens, k

    monkeypatch.setattr(Client, "score", score)
    with fleet_of(servers, tmp_path, max_retries=1) as (fleet, reports), ThreadPoolExecutor(1) as pool:
        ask: Any = fleet.score
        slow = pool.submit(ask, (1, 5))
        assert eventually(lambda: bool(asked))
        quick = [ask((1,), k) for k in (1, 2, 3)]
        gate.set()
        assert [slow.result(TIMEOUT_S), *quick] == [((1, 5), 0), ((1,), 1), ((1,), 2), ((1,), 3)]
        assert asked[1:] == [server.url for server in servers if server.url != asked[0]] * 3
        for fault, lost in ((ServerFault("nonsense"), 0), (ServerGone("gone"), 1)):
            faults.append(fault)
            assert ask((1,), 4) == ((1,), 4)
            assert len(reports) == lost
        assert fleet.figures()["requests/retried"] == 2


def test_a_fleet_may_stop_while_a_server_is_brought_back(servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet_of(servers, tmp_path) as (fleet, _):
        fleet._lost[1] = started = Future[None]()
        started.set_result(None)
        monkeypatch.setattr(fleet, "_client", lambda server: fleet.stop())
        fleet._bring_back(1, started)
        assert not fleet._clients


def test_what_a_lost_server_owes_the_other_draws_and_no_more(servers: list[FaultyServer], tmp_path: Path) -> None:
    def half(server: FaultyServer, samples: list[Any]) -> tuple[int, bytes]:
        server.always = answer_well
        server.alive = False
        return 200, answer(samples[:1])[:-8]  # dies within the stream

    servers[0].always = half
    with fleet_of(servers, tmp_path) as (fleet, reports):
        (client,) = (one for one in fleet.sampling().values() if one.url == servers[1].url)
        alone = draw_group(client, (1, 5), SAMPLING, n=3, seed=11, version=WeightsVersion(0))
        expected = {("a", index): response for index, response in enumerate(alone)}
        servers[1].seeds.clear()
        with fleet.sample_stream(SAMPLING) as stream:
            stream.submit("a", (1, 5), 11, 3)
            assert drawn(stream) == expected
        assert servers[1].seeds == [12, 13]  # not sample 0, which came
        assert "its requests go to the other servers" in reports[0]
        fleet._take_back()


def test_a_stream_asks_no_revived_server_that_has_no_weights_yet(server: FaultyServer, tmp_path: Path) -> None:
    """An update fails and all servers are revived, in another thread, before the stream sees what became of its requests."""
    server.hangs = {SAMPLES}
    with fleet_of([server], tmp_path) as (fleet, _), fleet.sample_stream(SAMPLING) as stream:
        stream.submit("a", (1, 5), 11)
        wait_for_calls(1, server)
        fleet._end()
        server.hangs.clear()
        assert fleet.revive()
        with fleet._announced(WeightsVersion(1)):  # the next update: they have its weights when it is over
            with pytest.raises(ServerDied, match="no rollout server samples"):
                stream.next(None)
            assert server.calls == [SAMPLES]
        assert len(fleet.sampling()) == 1


def test_a_stream_that_starts_without_servers_waits_only_for_an_update(server: FaultyServer, tmp_path: Path) -> None:
    """Another stream has lost the last server."""
    with fleet_of([server], tmp_path) as (fleet, _):
        server.alive = False
        with pytest.raises(ServerDied):
            fleet.lose(0, fleet.sampling()[0], ServerGone("gone"))
        with fleet.sample_stream(SAMPLING) as stream:
            stream.submit("a", (1, 5), 11)
            with pytest.raises(ServerDied, match="no server is left to sample"):
                stream.next(0.0)
        assert fleet.revive()
        with ExitStack() as stack:
            with fleet._announced(WeightsVersion(0)):
                stream = stack.enter_context(fleet.sample_stream(SAMPLING))
                stream.submit("a", (1, 5), 11)
                assert stream.next(0.0) is None
            assert len(drawn(stream)) == 1


def revive_and_update(fleet: Fleet) -> None:
    assert fleet.revive()
    with fleet._announced(WeightsVersion(0)):
        pass
    fleet._version = WeightsVersion(0)


def test_an_idle_stream_asks_the_servers_that_were_revived(servers: list[FaultyServer], tmp_path: Path) -> None:
    with fleet_of(servers, tmp_path) as (fleet, _), fleet.sample_stream(SAMPLING) as stream:
        fleet._end()
        revive_and_update(fleet)
        for number in range(8):
            stream.submit(number, (1, 5), number)
        assert {key for key, _ in drawn(stream)} == {*range(8)}
        assert fleet.figures()["requests/retried"] == 0


def test_a_lane_that_was_replaced_takes_its_own_requests_along(servers: list[FaultyServer], tmp_path: Path) -> None:
    """Both servers end at once with requests, and are there again before the stream looks."""
    servers[0].hangs = servers[1].hangs = {SAMPLES}
    with fleet_of(servers, tmp_path) as (fleet, _), fleet.sample_stream(SAMPLING) as stream:
        for number in range(8):
            stream.submit(number, (1, 5), number)
        wait_for_calls(8, *servers)  # one that still connects would be answered over the old client
        fleet._end()
        assert eventually(lambda: stream._events.qsize() == 8)
        servers[0].hangs.clear()
        revive_and_update(fleet)
        keys = set()
        for key, _, _ in stream:
            keys.add(key)
            assert all(any(request.lane is lane for lane in stream._lanes.values()) for request in stream._sent.values())
        assert keys == {*range(8)}


def test_prompts_are_shared_by_one_version_and_during_an_update_by_none(server: FaultyServer, tmp_path: Path) -> None:
    salts: list[str] = []
    with fleet_of([server], tmp_path) as (fleet, _):
        fleet._clients[0].versions_apart = True
        answered = server.sample
        server.sample = lambda body: salts.append(body["cache_salt"]) or answered(body)  # type: ignore[method-assign,func-returns-value]

        def ask() -> list[str]:
            salts.clear()
            with fleet.sample_stream(SAMPLING) as stream:
                for key in "ab":
                    stream.submit(key, (1, 5), 11)
                drawn(stream)
            return salts

        before = ask()[0]
        assert salts == [before, before]
        with fleet._announced(WeightsVersion(1)):
            assert len({before, "1:", *ask()}) == 4
        server.version = "1:"
        assert ask() == ["1:", "1:"]


def test_the_cache_is_kept_with_newer_weights_only(server: FaultyServer, tmp_path: Path) -> None:
    """A rollback publishes a version again, whose label is the salt of older prompts."""
    with fleet_of([server], tmp_path) as (fleet, _):
        fleet._keep_cache = True
        for step, keeps in ((1, True), (2, True), (1, False), (2, True)):
            server.calls.clear()
            fleet.update_weights_from_shards(WeightsVersion(step), Sender(server.calls))  # type: ignore[arg-type]
            assert ("/pause?mode=keep&clear_cache=false" in server.calls) == keeps
            assert ("/pause?mode=keep" in server.calls) == ("/reset_prefix_cache" in server.calls) == (not keeps)


def test_an_abort_gives_what_there_is(server: FaultyServer, tmp_path: Path) -> None:
    """Of one request a part, of another nothing, of a third the whole, and nothing of what was not asked for yet."""
    reasons = iter(["abort", "abort", "stop"])

    def ended(server: FaultyServer, samples: list[Any]) -> tuple[int, bytes]:
        while "/tepo/samples/abort" not in server.calls:
            time.sleep(0.01)
        (sample,) = samples
        reason = next(reasons)
        cut = 0 if sample["ids"][0] == 6 and reason == "abort" else 1 if reason == "abort" else 2
        changed = {"ids": sample["ids"][:cut], "logprobs": sample["logprobs"][:cut], "finish_reason": reason}
        return answer_well(server, [sample | changed | ({"versions": []} if not cut else {})])

    server.always = ended
    with fleet_of([server], tmp_path, max_num_seqs=2) as (fleet, _), fleet.sample_stream(SAMPLING) as stream:
        for key in range(6):
            stream.submit(key, (1, key), 4)  # at most four are on their way
        wait_for_calls(2, server)  # of its two connections; of requests that begin after an abort there is nothing
        found = stream.abort()
        assert stream.unfinished == 0
        assert 1 <= len(found) <= 3
        assert {each.finish_reason for *_, each in found} <= {"abort", "stop"}
        server.always = answer_well
        stream.submit("later", (1, 5), 4)
        assert len(drawn(stream)) == 1


def test_an_abort_waits_as_long_as_parts_come(server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four come one by one, 40 seconds apart by the stream's clock. Then a connection breaks, and one never comes."""
    now, turns = [0.0], iter(range(6))
    monkeypatch.setattr("tepo_megatron.sampler.fleet.stream.time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))

    def late(server: FaultyServer, samples: list[Any]) -> tuple[int, bytes] | None:
        turn = next(turns)
        assert eventually(lambda: "/tepo/samples/abort" in server.calls and len(stream._sent) == 6 - turn)
        now[0] += 40.0 if turn < 5 else 61.0
        assert turn < 5 or eventually(lambda: not stream._sent)
        return answer_well(server, [samples[0] | {"finish_reason": "abort"}]) if turn < 4 else None

    server.always = late
    with fleet_of([server], tmp_path, request_timeout_s=60.0) as (fleet, reports), fleet.sample_stream(SAMPLING) as stream:
        for key in range(6):
            stream.submit(key, (1, key), 4)
        wait_for_calls(6, server)
        assert [each.finish_reason for *_, each in stream.abort()] == ["abort"] * 4
        (report,) = reports
        assert re.match(rf"2 unfinished responses were lost when a step ended: POST {server.url}{SAMPLES}: \w+", report)


JOIN, UPDATE = "/init_weight_transfer_engine", ["/start_weight_update", "/update_weights", "/finish_weight_update"]
UPDATE += ["/reset_prefix_cache"]
SLEEP, WEIGHTS, CACHE = "/sleep?level=2", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"


@pytest.fixture
def fleet(server: FaultyServer, tmp_path: Path) -> Iterator[Fleet]:
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


def test_servers_that_ranks_used_before_their_restart_drop_what_those_asked_for(
    servers: list[FaultyServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And draw nothing before they have this trainer's weights."""
    for module in ("fleet", "server_pool"):
        monkeypatch.setattr(f"tepo_megatron.sampler.fleet.{module}.ExternalServer", FaultyServer)
    monkeypatch.setattr(FaultyServer, "was_used", property(lambda server: server is servers[0]), raising=False)
    with fleet_of(servers, tmp_path) as (fleet, _):
        assert [served(server) for server in servers] == [["/pause?mode=abort", "/resume"], []]
        with pytest.raises(RuntimeError, match="do not have the current weights"):
            sample(fleet)


def test_who_samples_while_another_thread_revives_servers_learns_of_a_death(
    server: FaultyServer, sender: Any, tmp_path: Path
) -> None:
    with fleet_of([server], tmp_path) as (fleet, _):
        fleet.update_weights_from_shards(WeightsVersion(1), sender)
        server.kills = {"/update_weights"}
        with pytest.raises(ServerDied):
            fleet.update_weights_from_shards(WeightsVersion(2), sender)
        server.kills = set()
        with pytest.raises(ServerDied, match="do not have the current weights"):
            sample(fleet)
        assert fleet.revive()
        with pytest.raises(ServerDied, match="do not have the current weights"):
            sample(fleet)
        fleet.update_weights_from_shards(WeightsVersion(2), sender)
        sample(fleet)
    with pytest.raises(RuntimeError, match="start the fleet") as stopped:
        sample(fleet)
    assert not isinstance(stopped.value, ServerDied)


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


def test_a_server_that_only_seemed_dead_sleeps_before_it_gets_weights(server: FaultyServer, fleet: Fleet, sender: Any) -> None:
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


@pytest.mark.parametrize(
    ("failed", "error", "refusal"),
    [
        ("The first other trainer rank to fail was rank 3: no room", None, "{}"),
        ("", RuntimeError("no memory"), "{}"),
        ("", None, "the weight update failed in worker 0 of this server: 1 tensors did not arrive as they were sent: 'x'"),
    ],
)
def test_the_error_says_what_failed_that_new_servers_would_not_mend(
    failed: str, error: Exception | None, refusal: str, server: FaultyServer, fleet: Fleet, sender: Any
) -> None:
    sender.failed, sender.own_fault, server.refuses, server.refusal = failed, bool(failed), {"/update_weights"}, refusal
    sender.error, own = error, f"rank 0 failed: {error}. .*" if error else ""
    message = rf"(?s)weights 1 did not reach .*{own}status 500: {refusal}" + (rf"\. {failed}" if failed else "")
    with pytest.raises(RuntimeError, match=message) as caught:
        fleet.update_weights_from_shards(WeightsVersion(1), sender)
    assert not isinstance(caught.value, ServerDied)
    assert server.calls[-1] == "arrived: False"


@pytest.mark.parametrize("failed", ["", "rank 3 had no room"])
def test_a_silent_server_makes_no_repeat_of_a_ranks_own_fault(failed: str, server: FaultyServer, sender: Any) -> None:
    server.hangs = {"/update_weights"}
    sender.error, sender.failed, sender.own_fault = None if failed else RuntimeError("no memory"), failed, bool(failed)
    config = ServerConfig(transfer_timeout_s=3.0, request_timeout_s=3.0)  # for the one that hangs; others take milliseconds
    sync = WeightSync([Client(server.url, "key", TIMEOUT_S)], config)
    with pytest.raises(RuntimeError, match="gave no answer" if failed else "rank 0 failed: no memory") as caught:
        sync.update_from_shards(WeightsVersion(1), sender)
    assert not isinstance(caught.value, ServerFault)
    server.released.set()
    sync.close()


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
