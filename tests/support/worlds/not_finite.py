"""Plants NaN and infinity in one rank's update, one kind after the other, and then makes an update that is whole.

Started on every rank: not_finite CASE.json. Every rank writes what it saw.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import token_logprobs
from tests.support.small_llama import draw_rollouts


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    case: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    config = RunConfig.model_validate(case["config"])

    from tepo_megatron.trainer.megatron.engine import Engine

    engine = Engine(config, Path(config.model.path))
    rank = engine.ranks.rank
    rollouts = draw_rollouts([5, 7, 6, 9, 8, 5, 7, 6])
    report: dict[str, Any] = {"plants": []}
    for plant in case["plants"]:
        batch = engine.batch_from_root(rollouts if rank == 0 else None)
        if plant["kind"] == "sampler":
            logprobs = token_logprobs([float("nan"), *rollouts[3].sampler_logprobs[1:]])
            broken = [*rollouts[:3], replace(rollouts[3], sampler_logprobs=logprobs)]
            batch = engine.batch_from_root([*broken, *rollouts[4:]] if rank == 0 else None)
        before = digest(engine), engine.counters.updates, engine.policy.optimizer.param_groups[0]["lr"]
        with planted(engine, plant, phase="score"):
            batch = engine.score(batch)
        with planted(engine, plant, phase="update"):
            result = engine.update(batch)
        after = digest(engine), engine.counters.updates, engine.policy.optimizer.param_groups[0]["lr"]
        seen = {"skipped": result.skipped, "unchanged": before == after, "found": list(result.not_finite)}
        report["plants"].append({**plant, **seen})
    report["skipped"] = engine.counters.updates_skipped
    batch = engine.score(engine.batch_from_root(rollouts if rank == 0 else None))
    for _ in range(2):
        result = engine.update(batch)
        assert not result.skipped
    report |= {"digest": digest(engine), "lr": result.lr, "updates": engine.counters.updates, "norm": result.grad_norm}
    # A return to a checkpoint, in place: what was trained since is gone, and comes again in the same bits.
    saved = engine.checkpoints.save(Path(case["out"], "checkpoints"), step=1, state={})
    engine.update(batch)
    trained = digest(engine)
    engine.update(batch)
    engine.checkpoints.load(saved)
    assert (digest(engine), engine.counters.updates) == (report["digest"], report["updates"])
    engine.update(batch)
    assert digest(engine) == trained
    Path(case["out"], f"rank{rank}.json").write_text(json.dumps(report))
    engine.close()


def digest(engine: Any) -> str:
    """Of this rank's weights, masters and both Adam states, to the last bit."""
    from tepo_megatron.trainer.megatron.optimizer_states import collect

    seen = hashlib.blake2b()
    for name, state, tensor in collect(engine.policy.optimizer, engine.policy.params):
        seen.update(f"{name} {state}".encode() + tensor.numpy().tobytes())
    for param in engine.policy.params.values():
        seen.update(param.detach().float().numpy().tobytes())
    return seen.hexdigest()


@contextmanager
def planted(engine: Any, plant: dict[str, Any], *, phase: str) -> Iterator[None]:
    """The fault, on its rank and in its phase."""
    handles = []
    if plant["rank"] == engine.ranks.rank and plant.get("phase", "update") == phase:
        value = float(plant["value"])
        if plant["kind"] == "gradient":
            param = next(param for name, param in engine.policy.params.items() if plant["parameter"] in name)
            handles.append(param.register_hook(lambda gradient: gradient * value))
        if plant["kind"] == "logits":

            def spoil(module: Any, inputs: Any, output: Any) -> Any:
                logits, bias = output
                return logits * value, bias

            handles.append(engine.policy.chunks[0].output_layer.register_forward_hook(spoil))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


if __name__ == "__main__":
    main()
