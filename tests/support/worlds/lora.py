"""What every rank of a test of LoRA does; started by torchrun: lora CASE.json.

Takes one model and split after the other: scores, trains two steps on adapters that a PEFT folder holds, saving after each,
exports. A run that resumes loads another split's checkpoint instead of its first step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.sampler.rollout_file import read_rollouts
from tests.support.model_worlds import train_in_turn
from tests.support.worlds.models import MeanSurprise, update_twice


class WithReference(MeanSurprise):
    needs_reference = True


def one_model(config: RunConfig, rollouts: Path, out: Path, resume: str | None) -> tuple[Any, dict[str, Any]]:
    """Everything that the tests look at. Returns the engine and its report."""
    from tepo_megatron.trainer.megatron.collectives import all_gather_json
    from tepo_megatron.trainer.megatron.engine import Engine

    engine = Engine(config, Path(config.model.path), WithReference())
    policy, is_root = engine.policy, engine.ranks.rank == 0
    frozen = {name: param.detach().clone() for name, param in policy.params.items()}
    batch = engine.score(engine.batch_from_root(read_rollouts(rollouts, 0) if is_root else None))
    assert batch.old_logprobs_T is not None
    assert batch.reference_logprobs_T is not None
    report: dict[str, Any] = {
        "logprobs": batch.old_logprobs_T.tolist(),
        "reference": batch.reference_logprobs_T.tolist(),
    }
    report["updates"] = update_twice(engine, batch, out, resume)
    assert all(torch.equal(param, frozen[name]) for name, param in policy.params.items())
    assert not any(hasattr(param, "main_grad") or param.grad is not None for param in policy.params.values())
    buffers = [buffer for ddp in policy.ddp for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    assert {id(param) for buffer in buffers for param in buffer.params} == {id(param) for param in policy.trained.values()}
    optimized = sum(param.numel() for group in policy.optimizer.param_groups for param in group["params"])
    report["optimized"] = all_gather_json(optimized, device=torch.device("cpu"), group=engine.host_group)
    engine.weights.export(out / "trained")
    engine.weights.export_adapters(out / "adapter")
    return engine, report


def main() -> None:
    train_in_turn(one_model)


if __name__ == "__main__":
    main()
