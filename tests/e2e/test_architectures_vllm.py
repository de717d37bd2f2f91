"""Every architecture in real vLLM servers, updated through the bridge from a trainer at TP2 × PP2.

The servers start with other weights than the trainer's. After an update they decode greedily what transformers does with the
trainer's, and give the log-probs that the trainer gives; also after one of two servers was killed during a second update.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.run.weights import WeightPublisher
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.sampler.protocol import ServerDied
from tepo_megatron.sampler.sampling import Sampling
from tepo_megatron.sampler.vllm.server import Server
from tests.support.engines import make_engine
from tests.support.faulty_server import draw_group
from tests.support.launch import run_dist
from tests.support.programs import FEW_BLOCKS
from tests.support.random_models import EOS, LENGTH, MODELS, PROMPTS, greedy, random_model, rollouts_of

SERVED, TRAINED = 0, 1
"""Seeds of the weights that the servers start with, and of the trainer's."""

EXPERTS = {
    "Mixtral": {"sequence_parallel": True, "ep": 2, "etp": 1},
    "Qwen3Moe": {"sequence_parallel": True, "etp": 2},
    "Glm4Moe": {"sequence_parallel": True, "ep": 2, "etp": 1},
}
"""How the trainer splits the experts: over two ranks, or each expert over both."""


@dataclass(frozen=True)
class Case:
    model: str
    tp: int
    transfer: str = "reshard"
    count: int = 1
    """Of two servers, both get full tensors first, and the last one is killed during a second update."""

    @property
    def name(self) -> str:
        return f"{self.model}-tp{self.tp}-{self.transfer}" + "-killed" * (self.count - 1)


def transfers(model: str, tp: int) -> tuple[str, ...]:
    return ("reshard", "gather") if model == "Qwen2-tied" or (model, tp) == ("Mixtral", 1) else ("reshard",)


CASES = [
    Case("Qwen2-tied", 1, count=2),
    *(Case(model, tp, transfer) for model in MODELS for tp in (1, 2) for transfer in transfers(model, tp)),
]
SOON = {"Qwen2-tied-tp1-reshard-killed", "Glm4Moe-tp2-reshard"}
"""The others are long tests: their tensors are among those of these."""

NAMED = pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[] if case.name in SOON else [pytest.mark.long]) for case in CASES]
)


def look(engine: Any, fleet: Fleet | None) -> dict[str, Any]:
    """What every server says, and how far the trainer's log-probs are from those it sampled with."""
    rollouts = None
    seen: dict[str, Any] = {}
    if fleet is not None:
        version = fleet.weights_version
        assert version is not None
        sampled = fleet.generate(PROMPTS, n=4, temperature=1.0, max_new_tokens=LENGTH, seed=1)
        rollouts = rollouts_of(sampled, PROMPTS)
        seen = {"version": version.step, "greedy": []}
        for client in fleet._clients:
            drawn = [draw_group(client, ids, Sampling(0.0, LENGTH, (EOS,)), n=1, seed=None, version=version) for ids in PROMPTS]
            seen["greedy"].append([response.response_ids.tolist() for (response,) in drawn])
    batch = engine.score(engine.batch_from_root(rollouts))
    gap = (batch.old_logprobs_T - batch.sampler_logprobs_T)[batch.loss_mask_T].abs().max()
    return {**seen, "gap": float(gap)}


def kill_when_sending(sender: Any, fleet: Fleet | None) -> None:
    """The next time rank 0 is about to send, when the others already do, the last server dies."""
    if fleet is None:
        return
    send_shards, server = sender.send_shards, fleet._servers[-1]
    assert isinstance(server, Server)
    process = server._process

    def send_late(cancelled: Callable[[], bool]) -> None:
        sender.send_shards = send_shards
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGKILL)
        send_shards(cancelled)

    sender.send_shards = send_late


def served(case: Case, folder: Path, rank: int) -> dict[str, Any]:
    limits = {"max_model_len": 64, "max_num_seqs": 32, "extra_args": (FEW_BLOCKS,)}
    options = {"count": case.count, "tp": case.tp, "transfer": case.transfer, **limits}
    document: dict[str, Any] = {
        "model": {"path": str(folder / case.model / "trained")},
        "engine": {"parallel": {"tp": 2, "pp": 2, **EXPERTS.get(case.model, {})}},
        "rollout": {"server": {**options, "transfer_timeout_s": 60 if case.count > 1 else 600}},
    }
    config = RunConfig.model_validate(document)
    logs, model_dir = folder / case.name, folder / case.model / "served"
    started: Any = nullcontext()
    if rank == 0:
        logs.mkdir()
        started = Fleet(
            config.rollout.server, model_dir=model_dir, dtype="float32", stop_token_ids=[EOS], log_dir=logs, trained=True
        )
    with started as fleet:
        engine = make_engine(config)
        publisher = WeightPublisher(engine.config, engine.weights, fleet)

        def update(version: int, publisher: WeightPublisher = publisher) -> bool:
            died = False
            try:
                publisher.update_weights(WeightsVersion(version))
            except ServerDied:
                fleet.revive()
                died = True
            return bool(engine.broadcast_from_root(died))

        gather = RunConfig.model_validate({**document, "rollout": {"server": {**options, "transfer": "gather"}}})
        assert not update(1, publisher if case.count == 1 else WeightPublisher(gather, engine.weights, fleet))
        report: dict[str, Any] = {"looks": [look(engine, fleet)]}
        if case.count > 1:
            kill_when_sending(publisher._sender, fleet)
            assert update(2)
            assert not update(2)
            report["looks"].append(look(engine, fleet))
    return report


def served_in_turn(rank: int, _world: int, folder: Path, cases: list[Case]) -> dict[str, Any]:
    return {case.name: served(case, folder, rank) for case in cases}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    selected = {item.name.partition("[")[2].rstrip("]") for item in request.session.items if item.path == request.path}
    cases = [case for case in CASES if case.name in selected]
    folder = tmp_path_factory.mktemp("architectures_vllm")
    for model in {case.model for case in cases}:
        for role, seed in (("served", SERVED), ("trained", TRAINED)):
            random_model(model, seed).save_pretrained(folder / model / role)
    return run_dist(4, served_in_turn, folder, cases)[0]


@NAMED
def test_greedy_tokens_are_those_of_transformers_and_logprobs_those_of_the_trainer(report: dict[str, Any], case: Case) -> None:
    expected = greedy(case.model, TRAINED)
    assert expected != greedy(case.model, SERVED)  # without this a server could have kept its weights
    looks = report[case.name]["looks"]
    assert len(looks) == case.count
    for number, seen in enumerate(looks, start=1):
        assert seen["greedy"] == [expected] * case.count
        assert seen["gap"] < 1e-4
        assert seen["version"] == number
