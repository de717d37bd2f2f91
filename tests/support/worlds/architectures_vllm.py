"""A trainer at TP2 × PP2 puts one model after the other into vLLM's offline engines: architectures_vllm FOLDER.

FOLDER/cases.json lists the cases. An engine starts with the weights of FOLDER/MODEL/served, the trainer with those of
FOLDER/MODEL/trained. Writes FOLDER/report.json: by case, what the engine says after the update.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.weights import make_shard_sender
from tepo_megatron.sampler.fleet.sync import WeightSync
from tepo_megatron.sampler.vllm.client import Client
from tepo_megatron.sampler.vllm.resources import reserve_port
from tepo_megatron.sampler.vllm.server import is_healthy
from tests.support.launch import end_model_parallel
from tests.support.random_models import EOS, LENGTH, PROMPTS
from tests.support.samples import draw_group

ADDRESS = "127.0.0.1"
START_TIMEOUT_S = 1500.0
TRANSFER_TIMEOUT_S = 600.0
HOST_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # or every engine compiles the function that ranks log-probs, for seconds
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the process that serves; so does the worker if it is one
    "VLLM_HOST_IP": ADDRESS,
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_RPC_BASE_PATH": tempfile.gettempdir(),  # of sockets, whose paths must be short
}
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")


class Host:
    """The process of ``offline_host.py``, which runs vLLM's engines. Its end is theirs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._log = folder, folder / "host.log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN)}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tepo_megatron.sampler.vllm.plugin.start", "tests.support.worlds.offline_host"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment | HOST_ENVIRONMENT | {"TMPDIR": str(folder)},
                text=True,
            )

    def engines(self, cases: Sequence[dict[str, Any]]) -> Iterator[Client]:
        """The engine of each case in turn, when it is up; meanwhile the next one starts, and the one before ends."""
        port = self._start(cases[0])
        for following in cases[1:]:
            client, up = self._client(port), port
            port = self._start(following)
            yield client
            self._order({"stop": up})
        yield self._client(port)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(600)

    def _start(self, case: dict[str, Any]) -> int:
        port = reserve_port(ADDRESS).getsockname()[1]
        self._order({"start": port, "model": str(self._folder / case["model"] / "served"), "tp": case["tp"]})
        return port

    def _client(self, port: int) -> Client:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_healthy(ADDRESS, port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM's engine is not up:\n{self._log.read_text()[-6000:]}")
            time.sleep(0.05)
        return Client(f"http://{ADDRESS}:{port}", "nobody-asks", timeout_s=START_TIMEOUT_S)

    def _order(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()


def update_weights(engine: Any, client: Client | None, case: dict[str, Any]) -> None:
    """One update, as the trainer makes it; rank 0 has the client."""
    timeouts = {"transfer_timeout_s": TRANSFER_TIMEOUT_S, "request_timeout_s": TRANSFER_TIMEOUT_S}
    config = ServerConfig(host=ADDRESS, tp=case["tp"], **timeouts)
    if case["transfer"] == "gather":
        tensors = (tensor for _, tensor in engine.weights.stream() if tensor is not None)
        if client is None:
            assert not list(tensors)
            return
        broadcast = WeightSync([client], config)
        broadcast.update_from_tensors(
            WeightsVersion(1), [(meta.name, meta.shape, meta.dtype) for meta in engine.weights.manifest], tensors
        )
        broadcast.close()
        return
    sender = make_shard_sender(engine.config, engine.weights)
    if client is None:
        sender.update_as_non_root()
        sender.close()
    else:
        shards = WeightSync([client], config)
        shards.update_from_shards(WeightsVersion(1), sender)
        sender.finish_update(arrived=True)
        shards.close()


def draw(client: Client) -> tuple[list[list[int]], list[Rollout]]:
    """Greedy tokens after every prompt, and these and sampled ones as rollouts."""
    options: dict[str, Any] = {"max_new_tokens": LENGTH, "stop_token_ids": [EOS], "version": WeightsVersion(1)}
    groups = [draw_group(client, prompt, n=1, temperature=0.0, seed=None, **options) for prompt in PROMPTS]
    greedy = [group[0].response_ids.tolist() for group in groups]
    for at, (prompt, group) in enumerate(zip(PROMPTS, groups, strict=True)):
        group += draw_group(client, prompt, n=3, temperature=1.0, seed=at, **options)
    return greedy, [
        Rollout(str(at), at, PROMPTS[at], r.response_ids, r.logprobs, r.finish_reason, r.versions, reward=float(n % 2))
        for at, group in enumerate(groups)
        for n, r in enumerate(group)
    ]


def look(engine: Any, client: Client | None) -> dict[str, Any]:
    """What the engine says, and how far the trainer's log-probs are from its own for the same tokens. Every rank calls."""
    greedy, rollouts = draw(client) if client is not None else (None, None)
    batch = engine.score(engine.batch_from_root(rollouts))
    gap = (batch.old_logprobs_T - batch.sampler_logprobs_T)[batch.loss_mask_T].abs().max()
    return {"greedy": greedy, "gap": float(gap)}


def run(cases: Sequence[dict[str, Any]], folder: Path, clients: Iterator[Client | None]) -> dict[str, Any]:
    """All cases in turn: what each engine says once it has the trainer's weights."""

    from tepo_megatron.trainer.megatron.engine import Engine

    report = {}
    for case in cases:
        server = {"tp": case["tp"], "transfer": case["transfer"], "transfer_timeout_s": TRANSFER_TIMEOUT_S}
        parallel = {"tp": 2, "pp": 2, **case["experts"]}
        config = RunConfig.model_validate({"engine": {"parallel": parallel}, "rollout": {"server": server}})
        engine = Engine(config, folder / case["model"] / "trained")
        client = next(clients)
        update_weights(engine, client, case)
        report[case["name"]] = look(engine, client)
        end_model_parallel()  # the next engine splits the same ranks again
    engine.close()
    return report


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    cases = json.loads((folder / "cases.json").read_text())
    if os.environ["RANK"] != "0":
        run(cases, folder, repeat(None))
        return
    host = Host(folder)
    try:
        report = run(cases, folder, host.engines(cases))
    finally:
        host.close()
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
