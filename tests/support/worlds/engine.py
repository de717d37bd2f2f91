"""What every rank of an engine test does; started by torchrun: engine CASE.json.

Trains a few optimizer steps on given rollouts under one parallel layout, and writes what the tests compare with other layouts.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.sampler.rollout_file import read_rollouts


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    case: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    out = Path(case["out"])
    config = RunConfig.model_validate(case["config"])

    from tepo_megatron.run.step.minibatches import minibatches
    from tepo_megatron.trainer.megatron.collectives import all_gather_json
    from tepo_megatron.trainer.megatron.engine import Engine

    engine = Engine(config, Path(config.model.path))
    forwarded: list[int] = []
    engine.policy.chunks[0].register_forward_pre_hook(lambda _module, inputs: forwarded.append(inputs[0].numel()))
    start = 0
    if case["resume"]:
        start = engine.checkpoints.load(Path(case["resume"]))["step"]
    else:
        engine.weights.export(out / "initial")
    is_root = engine.ranks.rank == 0
    random_state = torch.get_rng_state()
    report: dict[str, Any] = {"updates": [], "digest": engine.weights.version(start).digest}
    report["prompt_logprobs"] = engine.prompt_logprobs(case["prompt"])
    for step in range(start, case["steps"]):
        rollouts = read_rollouts(Path(case["rollouts"]), step) if is_root else None
        batch = engine.batch_from_root(rollouts)
        if step == 0:
            forwarded.clear()
            whole = engine.score(batch)
            report["forwarded"] = list(forwarded)
            report["old_logprobs"] = whole.old_logprobs_T.tolist()
            report["old_entropy"] = whole.old_entropy_T.tolist()
        parts = minibatches(batch, config.train.minibatches, seed=config.seed, step=step)
        for part in [engine.score(part) for part in parts]:
            result = engine.update(part)
            report["updates"].append(
                {"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr, **result.extrema}
                | {name: total / count if count else 0.0 for name, (total, count) in result.sums.items()}
            )
        if step + 1 == case["save_at"]:
            engine.counters.entropy_noise = 0.125  # as if it had been measured in an earlier step
            engine.checkpoints.save(out / "checkpoints", step=step + 1, state={"note": "kept"})
            report["saved_logprobs"] = engine.prompt_logprobs(case["prompt"])
    report["drew_random_numbers"] = not torch.equal(torch.get_rng_state(), random_state)
    report["entropy_noise"] = engine.counters.entropy_noise
    report["bytes_read"] = all_gather_json(engine.checkpoints.bytes_read, device=torch.device("cpu"), group=engine.host_group)
    engine.weights.export(out / "trained")
    if is_root:
        (out / "report.json").write_text(json.dumps(report))
    engine.close()


if __name__ == "__main__":
    main()
