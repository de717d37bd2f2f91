"""A real vLLM server on the CPU, with ``transformers`` as the oracle for tokens and log-probs."""

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.runtime.proc import Process
from tepo_megatron.runtime.supervise import SHM
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.sampler.protocol import ServerDied
from tepo_megatron.sampler.sampling import Sampling
from tepo_megatron.sampler.vllm.client import Client
from tepo_megatron.sampler.vllm.resources import worker_cores
from tepo_megatron.sampler.vllm.server import Server
from tests.contracts.sampler_contract import EOS, MAX_LENGTH, PROMPTS, contract_model, manifest, write_model
from tests.support.processes import assert_none_names, processes_naming
from tests.support.programs import FEW_BLOCKS, TIMEOUT_S
from tests.support.random_models import greedy_after

ATTEMPTS = 20
"""Of what has to come in the middle of responses: on a loaded machine all may have ended before the first is here."""


@contextmanager
def started(folder: Path, tp: int) -> Iterator[Fleet]:
    write_model(folder / "model")
    config = ServerConfig(tp=tp, max_model_len=MAX_LENGTH, max_num_seqs=64, max_restarts=5, extra_args=(FEW_BLOCKS,))
    with Fleet(config, model_dir=folder / "model", dtype="float32", stop_token_ids=[EOS], log_dir=folder) as running:
        assert processes_naming(folder)
        yield running
    assert_none_names(folder)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One server, whose only worker runs in the process of its engine core."""
    with started(tmp_path_factory.mktemp("single"), 1) as running:
        yield running


@pytest.fixture(scope="module")
def split_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One server of the same weights, with two workers, which are processes and share memory."""
    with started(tmp_path_factory.mktemp("split"), 2) as running:
        yield running


@pytest.fixture
def first_weights(fleet: Fleet) -> torch.nn.Module:
    """The server has the weights of ``contract_model(0)``; they are put back if a test changed them."""
    model = contract_model(0)
    if fleet.weights_version != WeightsVersion(0):
        fleet.revive()
        sync(fleet, model, WeightsVersion(0))
    return model


def sync(fleet: Fleet, model: torch.nn.Module, version: WeightsVersion) -> None:
    weights = model.state_dict()
    fleet.update_weights_from_tensors(version, manifest(weights), iter(weights.values()))


def only_server(fleet: Fleet) -> Server:
    (server,) = fleet._servers
    assert isinstance(server, Server)
    return server


def greedy(fleet: Fleet, length: int = 16) -> list[tuple[int, ...]]:
    groups = fleet.generate(PROMPTS, n=1, temperature=0.0, max_new_tokens=length, seed=0)
    return [tuple(group[0].response_ids.tolist()) for group in groups]


def greedy_oracle(model: torch.nn.Module, length: int = 16) -> list[tuple[int, ...]]:
    return [tuple(greedy_after(model, prompt, length)) for prompt in PROMPTS]


def sample(fleet: Fleet, seed: int, temperature: float = 1.0, n: int = 8, length: int = 24) -> list[list[Response]]:
    return fleet.generate(PROMPTS, n=n, temperature=temperature, max_new_tokens=length, seed=seed)


def test_a_server_sleeps_and_wakes_around_an_update_as_on_shared_gpus(
    fleet: Fleet, first_weights: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own order of sleep, partial waking and scheduling; on a CPU no memory goes or comes with it."""
    monkeypatch.setattr(fleet, "config", fleet.config.model_copy(update={"placement": "colocated"}))
    fleet._close_sync()
    for seed in (3, 4):
        other = contract_model(seed)
        fleet.sleep()
        with pytest.raises(RuntimeError, match="do not have the current weights"):
            greedy(fleet)
        sync(fleet, other, WeightsVersion(seed))
        assert is_sleeping(fleet)
        with pytest.raises(RuntimeError, match="asleep: its kv_cache are not on the GPU"):
            greedy(fleet)
        fleet.wake_up()
        assert not is_sleeping(fleet)
        assert greedy(fleet) == greedy_oracle(other)
    fleet._close_sync()


def test_keys_and_values_stay_in_an_update_where_the_config_says_so(
    fleet: Fleet, first_weights: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs after the update are then of old keys and values. That all are computed again is the contract's default."""
    monkeypatch.setattr(fleet, "_keep_cache", True)
    monkeypatch.setattr(fleet._clients[0], "versions_apart", True)
    fleet._close_sync()
    for attempt in range(ATTEMPTS):
        sync(fleet, contract_model(1), WeightsVersion(2 * attempt + 1))
        with fleet.sample_stream(Sampling(1.0, 180)) as stream:
            stream.submit("short", PROMPTS[1], 5, room=3)
            stream.submit("long", PROMPTS[0], attempt, 4)
            first = stream.next(None)
            sync(fleet, contract_model(2), WeightsVersion(2 * attempt + 2))
            responses = [response for _, _, response in (first, *stream) if len(response.versions) > 1]
        gaps = []
        for response in responses:
            start, logprobs = response.versions[1][0], torch.from_numpy(response.logprobs.copy())
            (scored,) = fleet.prompt_logprobs([*PROMPTS[0], *response.response_ids.tolist()]).values()
            gaps.append(float((torch.tensor(scored[len(PROMPTS[0]) - 1 :]) - logprobs)[start:].abs().max()))
        if gaps:
            break
    assert max(gaps) > 1e-2
    # What later requests begin with is never taken from a cache of older weights.
    for reading in fleet.read_through_cache(list(range(1, 60)) * 3, 8).values():
        assert reading.logprobs == reading.logprobs_without
        assert reading.cached_tokens == 0
    fleet._close_sync()


def test_a_cache_that_an_update_has_not_emptied_is_counted(
    fleet: Fleet, first_weights: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, client = list(range(1, 60)) * 3, fleet._clients[0]
    assert fleet.read_through_cache(prompt, 2)[client.url].cached_tokens == 0
    post = client._post

    def keep_cache(path: str, *args: Any, **options: Any) -> Any:
        if path == "/reset_prefix_cache":
            return {}
        return post(path.replace("/pause?", "/pause?clear_cache=false&"), *args, **options)

    monkeypatch.setattr(client, "_post", keep_cache)
    sync(fleet, contract_model(1), WeightsVersion(9))
    assert fleet.read_through_cache(prompt, 2)[client.url].cached_tokens >= 128  # a block of vLLM on a CPU
    monkeypatch.undo()
    fleet._close_sync()


def is_sleeping(fleet: Fleet) -> bool:
    headers = {"Authorization": f"Bearer {fleet._key}"}
    answer = httpx.get(fleet._servers[0].url + "/is_sleeping", headers=headers, timeout=TIMEOUT_S)
    return bool(answer.json()["is_sleeping"])


def stop_one(fleet: Fleet, title: str) -> psutil.Process:
    """SIGSTOP to a process of the server that calls itself so; returns it."""
    found = next(each for each in processes(fleet) if title in " ".join(each.cmdline()))
    found.suspend()
    return found


def processes(fleet: Fleet) -> list[psutil.Process]:
    """Those of its server, without the supervisor."""
    supervisor = only_server(fleet)._process
    return psutil.Process(supervisor.pid).children(recursive=True)


def test_the_engine_is_a_fork_of_the_server_and_runs_on_its_core(fleet: Fleet) -> None:
    """And nothing else runs; the fork has let go of the server's port."""
    server, engine = processes(fleet)
    assert "vllm.entrypoints.openai.api_server" in server.cmdline()
    assert engine.cmdline()[0].startswith("VLLM::EngineCore")
    assert engine.exe() == server.exe()
    assert engine.cpu_affinity() == [int(worker_cores(fleet.config, 1)[0])]
    port = only_server(fleet).port
    assert port in {each.laddr.port for each in server.net_connections()}
    assert port not in {each.laddr.port for each in engine.net_connections()}


def standing_still(client: Client) -> list[object]:
    """What it says of its progress, again and again, when all that was on its way to it has come."""
    deadline, said = time.monotonic() + TIMEOUT_S, [object()]
    while len(set(said)) > 1 or len(said) < 5:
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
        said = [*said[-4:], client.progress()]
    return said


def test_tokens_are_progress_where_no_answer_is_there_yet(
    fleet: Fleet, first_weights: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is stopped and goes on, before anybody minds; meanwhile nothing moves."""
    client = fleet._clients[0]
    for _ in range(ATTEMPTS):
        seen, still = list[object](), list[object]()
        with ThreadPoolExecutor(1) as pool:
            drawing = pool.submit(sample, fleet, 8, n=48, length=120)
            while not drawing.done():
                seen.append(client.progress())
                if len(set(seen)) == 3 and not still:
                    engine = stop_one(fleet, "EngineCore")
                    still = standing_still(client)
                    engine.resume()
            assert len(drawing.result()) == len(PROMPTS)
        if still:
            break
    assert len(set(still)) == 1
    assert len({*seen, *still}) >= 3
    assert client.progress() == '{"requests":0,"tokens":0,"updating":false}'


def test_the_canary_waits_for_no_sample_that_waits(fleet: Fleet, first_weights: torch.nn.Module) -> None:
    """As many samples wait as are drawn. Behind them it would be begun when half of all have finished."""
    at_once = fleet.config.max_num_seqs
    for _ in range(ATTEMPTS):
        with fleet.sample_stream(Sampling(1.0, 100)) as stream:
            for key in range(2):
                stream.submit(key, PROMPTS[0], 5 + 1000 * key, at_once)
            finished = int(stream.next(None) is not None)
            fleet.prompt_logprobs(PROMPTS[2])
            while stream.next(0.0) is not None:
                finished += 1
            assert len(list(stream)) == 2 * at_once - finished, "nothing was lost"
        if finished < at_once:
            break
    assert finished < at_once


# -- from here on servers end; whoever needs one afterwards waits for its start


def test_a_server_that_hangs_while_it_is_updated_is_killed_and_replaced(
    split_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped: it lives, its port is open, and its health is fine. The draws are those of a server that never hung."""
    fleet, first_weights = split_fleet, contract_model(0)
    sync(fleet, first_weights, WeightsVersion(0))
    before = sample(fleet, seed=9)
    server = only_server(fleet)
    group = server._process.pid
    names = shared_memory(fleet)
    assert names
    config = fleet.config.model_copy(update={"request_timeout_s": 4.0, "transfer_timeout_s": 4.0})
    monkeypatch.setattr(fleet, "config", config)
    fleet._close_sync()  # the next one has the short time-outs
    fleet._connect()
    fleet.figures()
    stop_one(fleet, "VLLM::Worker")
    assert server.healthy()
    with pytest.raises(ServerDied, match=r"no answer"):
        sync(fleet, first_weights, WeightsVersion(0))
    assert Process.in_group(group) == []
    assert not any((SHM / name).exists() for name in names)
    monkeypatch.undo()
    assert fleet.revive()
    sync(fleet, first_weights, WeightsVersion(0))
    assert sample(fleet, seed=9) == before
    assert fleet.figures() == {"servers/restarts": 1, "servers/timeouts": 1, "requests/retried": 0}


def shared_memory(fleet: Fleet) -> list[str]:
    """The names in /dev/shm that the server's supervisor has recorded. Its folder is there."""
    process = only_server(fleet)._process
    (folder,) = Path(tempfile.gettempdir()).glob(f"tepo-*-{process.pid}-*")
    record = folder / "shm"
    return [json.loads(line)[0] for line in record.read_text().splitlines()] if record.exists() else []


def test_a_killed_server_is_reported_and_leaves_nothing(split_fleet: Fleet) -> None:
    """How a fleet goes on: test_architectures_vllm.py, with a server that is killed."""
    fleet = split_fleet
    sync(fleet, contract_model(2), WeightsVersion(3))
    server = only_server(fleet)
    process = server._process
    assert process is not None
    names = shared_memory(fleet)
    assert names
    os.killpg(process.pid, signal.SIGKILL)
    with pytest.raises(ServerDied, match=server.url):
        greedy(fleet)
    server.stop()  # as before it is started again
    assert not any((SHM / name).exists() for name in names)
    assert not list(Path(tempfile.gettempdir()).glob(f"tepo-*-{process.pid}-*"))
