"""A trainer at TP2 × PP2 puts its weights into real vLLM servers, shard to shard.

reshard_vllm FOLDER

The servers start with the weights of FOLDER/served, the trainer with those of FOLDER/trained, so that greedy tokens tell whose
are in use. Writes FOLDER/report.json. The last server is killed in the middle of a second sync, revived and synced.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.weights import make_shard_sender
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.sampler.protocol import ServerDied
from tepo_megatron.sampler.vllm.server import Server
from tepo_megatron.weights.transfer.sender import ShardSender
from tests.support.random_models import EOS, LENGTH, PROMPTS
from tests.support.samples import draw_group


def update_weights(engine: Any, fleet: Fleet | None, sender: ShardSender, version: int) -> bool:
    """One sync, as the loop does it; whether a server died."""
    died = False
    if fleet is None:
        sender.update_as_non_root()
    else:
        try:
            fleet.update_weights_from_shards(WeightsVersion(version), sender)
        except ServerDied:
            fleet.revive()
            died = True
    return bool(engine.broadcast_from_root(died))


def look(engine: Any, fleet: Fleet | None) -> dict[str, Any]:
    """What every server says, and how far the trainer's log-probs are from those it sampled with."""
    rollouts, greedy = None, []
    if fleet is not None:
        sampled = fleet.generate(PROMPTS, n=4, temperature=1.0, max_new_tokens=LENGTH, seed=1)
        rollouts = [
            Rollout(str(g), g, PROMPTS[g], r.response_ids, r.logprobs, r.finish_reason, r.versions, reward=float(at % 2))
            for g, group in enumerate(sampled)
            for at, r in enumerate(group)
        ]
        for client in fleet._clients:
            arguments: dict[str, Any] = {"n": 1, "temperature": 0.0, "max_new_tokens": LENGTH, "seed": None}
            arguments["stop_token_ids"] = [EOS]
            assert fleet.weights_version is not None
            groups = [draw_group(client, prompt, **arguments, version=fleet.weights_version) for prompt in PROMPTS]
            greedy.append([group[0].response_ids.tolist() for group in groups])
    batch = engine.score(engine.batch_from_root(rollouts))
    gap = (batch.old_logprobs_T - batch.sampler_logprobs_T)[batch.loss_mask_T].abs().max()
    version = fleet.weights_version.step if fleet is not None and fleet.weights_version is not None else None
    return {"greedy": greedy, "gap": float(gap), "version": version}


def refusals(fleet: Fleet | None) -> list[str]:
    """What each server says to who asks it for a sample before it has weights, without the fleet."""
    said = []
    for client in fleet._clients if fleet is not None else []:
        try:
            client.prompt_logprobs(PROMPTS[0])
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said


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


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    served, trained = out / "served", out / "trained"
    server = {"count": 2, "max_model_len": 64, "max_num_seqs": 32, "transfer_timeout_s": 60}
    config = RunConfig.model_validate({"engine": {"parallel": {"tp": 2, "pp": 2}}, "rollout": {"server": server}})
    fleet = None
    if int(os.environ["RANK"]) == 0:
        fleet = Fleet(config.rollout.server, model_dir=served, dtype="float32", stop_token_ids=[EOS], log_dir=out, trained=True)
        fleet.start()
    from tepo_megatron.trainer.megatron.engine import Engine

    try:
        engine = Engine(config, trained)
        sender = make_shard_sender(config, engine.weights)
        report: dict[str, Any] = {"refusals": refusals(fleet)}
        assert not update_weights(engine, fleet, sender, 1)
        report["first"] = look(engine, fleet)
        kill_when_sending(sender, fleet)
        report["died"] = update_weights(engine, fleet, sender, 2)
        assert not update_weights(engine, fleet, sender, 2)
        report["again"] = look(engine, fleet)
    finally:
        if fleet is not None:
            fleet.stop()
    if fleet is not None:
        (out / "report.json").write_text(json.dumps(report))
    engine.close()


if __name__ == "__main__":
    main()
