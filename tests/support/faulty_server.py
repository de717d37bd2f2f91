"""A server of this process that answers as it is told, over real HTTP; for a fleet it has the methods of a ``Server``."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.sampler.sampling import Sample as Request
from tepo_megatron.sampler.sampling import Sampling
from tepo_megatron.sampler.vllm.client import Client
from tepo_megatron.sampler.vllm.wire import PROGRESS, SAMPLES, head_frame, response_frame
from tests.support.http_server import http_server

Sample = dict[str, Any]
"""A response as a test writes it: sample, ids, logprobs, finish_reason, versions."""


def response(
    sample: int,
    ids: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str | None = "stop",
    versions: Sequence[tuple[int, str]] = ((0, "default"),),
) -> Sample:
    return {"sample": sample, "ids": ids, "logprobs": logprobs, "finish_reason": finish_reason, "versions": versions}


def answer(samples: Sequence[Mapping[str, Any]]) -> bytes:
    """All of them, and the end."""
    return b"".join(response_frame(**sample) for sample in samples) + head_frame({"end": len(samples)})


def draw_group(
    client: Client, prompt: Sequence[int], sampling: Sampling, *, n: int, seed: int | None, version: WeightsVersion
) -> list[Response]:
    """Sample j has the seed ``seed`` + j."""
    samples = [Request(j, None if seed is None else seed + j, sampling.max_new_tokens) for j in range(n)]
    drawn = dict(client.draw("", prompt, samples, sampling, lambda: (version,)))
    return [drawn[j] for j in range(n)]


VOCABULARY = 64

Behaviour = Callable[["FaultyServer", list[Sample]], tuple[int, bytes] | None]
"""What becomes of the right samples: status and content, or None where the connection breaks off half-way."""


class FaultyServer:
    """Draws the same tokens for the same prompt and seed as any other does. ``faults`` are the behaviours for the next requests
    for samples, after which it answers well; ``always`` is for all of them. ``hangs`` are routes that it never answers, and
    ``refuses`` those that it answers with status 500 and ``refusal``, ``kills`` those that it dies of.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.seeds: list[int] = []
        self.faults: list[Behaviour] = []
        self.always: Behaviour = answer_well
        self.hangs: set[str] = set()
        self.refuses: set[str] = set()
        self.kills: set[str] = set()
        self.starts = self.stops = self.tokens = 0
        self.after_start: Callable[[FaultyServer], object] = lambda server: None
        self.alive = False
        self.version = "default"
        self.progress, self.refusal = "", "{}"
        self.released = threading.Event()
        self._lock = threading.Lock()
        self._open = ExitStack()
        self.url = self._open.enter_context(http_server(self._answer))
        self.port = int(self.url.rpartition(":")[2])

    def _answer(self, path: str, _headers: Any, raw: bytes) -> tuple[int, bytes] | tuple[int, bytes, Mapping[str, str]]:
        is_probe = path in ("/health", PROGRESS)
        if not is_probe:
            self.calls.append(path)
        if path in self.hangs:
            self.released.wait()
        if path in self.kills:
            self.alive = False
            raise ConnectionError
        body = json.loads(raw) if raw else {}
        self.version = body.get("weight_version", self.version)
        if path == SAMPLES:
            broken = 200, answer([choice([1], 0, "default")])[:20], {"Content-Length": "100000"}
            return self.sample(body) or broken
        said = (self.progress or json.dumps({"tokens": self.tokens})) if path == PROGRESS else "{}"
        return (500, self.refusal.encode()) if path in self.refuses else (200, said.encode())

    def sample(self, body: dict[str, Any]) -> tuple[int, bytes] | None:
        with self._lock:
            self.seeds += [wanted["seed"] for wanted in body["samples"]]
            behave = self.faults.pop(0) if self.faults else self.always
        drawn = [
            choice([*body["prompt"], *wanted["prefix"]], wanted["seed"], self.version) | {"sample": wanted["sample"]}
            for wanted in body["samples"]
        ]
        return behave(self, drawn)

    # -- as a Server

    def start(self, taken: Any = ()) -> None:
        self.starts += 1
        self.alive, self.version = True, "default"
        self.after_start(self)

    def wait_ready(self) -> None: ...

    def healthy(self) -> bool:
        return self.alive

    def stop(self) -> None:
        self.stops += self.alive
        self.alive = False

    def log_end(self) -> str:
        return "the end of its log"

    def close(self) -> None:
        self.released.set()
        self._open.close()


class Sender:
    """In place of the trainer's ranks: nothing travels."""

    num_sources, world_size = 1, 2
    failed, own_fault = "", False
    error: Exception | None = None

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
        if self.error is not None:
            raise self.error
        self.calls.append("shards are sent")

    def finish_update(self, arrived: bool) -> str:
        self.calls.append(f"arrived: {arrived}")
        return self.failed


def answer_well(server: FaultyServer, samples: list[Sample]) -> tuple[int, bytes]:
    return 200, answer(samples)


def choice(prompt: list[int], seed: int, version: str) -> Sample:
    token = (sum(prompt) + seed) % VOCABULARY
    return response(0, [token, 2], [-0.5, -0.25], "stop", [(0, version)])


@contextmanager
def fleet_of(servers: list[FaultyServer], folder: Path, **settings: Any) -> Iterator[tuple[Fleet, list[str]]]:
    """A started fleet of these servers, and what it reports."""
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    reports: list[str] = []
    config = ServerConfig(count=len(servers), **{"max_num_seqs": 8, "request_timeout_s": 60.0} | settings)
    fleet = Fleet(config, model_dir=folder, dtype="float32", stop_token_ids=[2], log_dir=folder, report=reports.append)
    fleet._servers = servers  # type: ignore[assignment]
    fleet.start()
    try:
        yield fleet, reports
    finally:
        fleet.stop()
