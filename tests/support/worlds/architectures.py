"""What every rank of an architecture test does; started by torchrun: architectures CASE.json.

Takes one model and layout after the other: exports what was loaded, scores, keeps the logits of that forward, trains a step,
saves and exports.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.core.types import Batch
from tepo_megatron.sampler.rollout_file import read_rollouts
from tests.support.model_worlds import in_turn


def one_model(config: RunConfig, rollouts: Path, out: Path) -> Any:
    """Everything that the tests look at, below ``out``. Returns the engine."""
    from tepo_megatron.trainer.megatron.engine import Engine

    engine = Engine(config, Path(config.model.path))
    is_root = engine.ranks.rank == 0
    engine.weights.export(out / "initial")
    batch = engine.batch_from_root(read_rollouts(rollouts, 0) if is_root else None)
    outputs: list[Tensor] = []  # of the model on this rank, for each micro-batch
    hook = engine.policy.chunks[0].register_forward_hook(lambda _model, _inputs, output: outputs.append(output.clone()))
    batch = engine.score(batch)
    hook.remove()
    save_logits(engine, batch, outputs, out)
    assert batch.old_logprobs_T is not None
    assert batch.old_entropy_T is not None
    if is_root:
        scores = {"logprobs": batch.old_logprobs_T.tolist(), "entropy": batch.old_entropy_T.tolist()}
        (out / "scores.json").write_text(json.dumps(scores))
    engine.update(batch)
    engine.checkpoints.save(out / "checkpoints", step=1, state={})
    engine.weights.export(out / "trained")
    return engine


def save_logits(engine: Any, batch: Batch, outputs: list[Tensor], out: Path) -> None:
    """The last stage's shards of the vocabulary side by side, without the padding of either axis: [T, V] of the batch."""
    ranks = engine.ranks
    if not ranks.is_last_stage:
        return
    logits_TV = torch.full((batch.num_tokens, engine.spec.vocab_size), torch.nan)
    for sequences, output in zip(engine.forward.micro_batches(batch), outputs, strict=True):
        shards = [torch.empty_like(output[0]) for _ in range(ranks.tp)]
        if ranks.tp > 1:
            dist.all_gather(shards, output[0], group=ranks.tp_group)
        else:
            shards = [output[0]]
        at_T = batch.token_index(sequences)
        logits_TV[at_T] = torch.cat(shards, dim=1)[: at_T.numel(), : engine.spec.vocab_size]
    if ranks.rank == ranks.last_stage_root:
        save_file({"logits": logits_TV}, out / "logits.safetensors")


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    case: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    in_turn(
        case["runs"],
        lambda run: one_model(RunConfig.model_validate(run["config"]), Path(case["rollouts"]), Path(run["out"])),
    )


if __name__ == "__main__":
    main()
