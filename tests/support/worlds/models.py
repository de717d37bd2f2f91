"""What every rank of a test of architectures does; started by torchrun: models CASE.json.

Takes one model and split after the other: exports what was loaded, scores, trains two steps, saving after each, exports. A run
that resumes loads another split's checkpoint instead of its first step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.core.types import Batch, ObjectiveOutput, TokenScores
from tepo_megatron.sampler.rollout_file import read_rollouts
from tests.support.model_worlds import train_in_turn


class MeanSurprise:
    """Minus the mean log-probability of the labels: a loss that any other library can compute."""

    needs_reference = False
    needs_entropy_slope = False

    def advantages(self, batch: Batch) -> Tensor:
        return torch.zeros(batch.num_sequences)

    def prepare(self, batch: Batch, **measured: object) -> Tensor:
        return batch.loss_mask_T.sum()

    def __call__(self, scores: TokenScores, batch: Batch, context: Tensor) -> ObjectiveOutput:
        return ObjectiveOutput(-scores.logprob[batch.loss_mask_T].sum(), context)


def update_twice(engine: Any, batch: Any, out: Path, resume: str | None) -> list[list[float]]:
    """Saves after each update; ``resume`` is a checkpoint that replaces the first. Returns [loss, gradient norm] of each."""
    updates = []
    for step in (1, 2):
        if resume and step == 1:
            engine.checkpoints.load(Path(resume))
            continue
        result = engine.update(batch)
        updates.append([result.loss, result.grad_norm])
        engine.checkpoints.save(out / "checkpoints", step=step, state={})
    return updates


def one_model(config: RunConfig, rollouts: Path, out: Path, resume: str | None) -> tuple[Any, dict[str, Any]]:
    """Everything that the tests look at. Returns the engine and its report."""
    from tepo_megatron.trainer.megatron.engine import Engine

    engine = Engine(config, Path(config.model.path), MeanSurprise())
    is_root = engine.ranks.rank == 0
    built = {name: tuple(param.shape) for name, param in engine.policy.params.items()}
    assert built == dict(engine.layouts[engine.ranks.rank].params)
    engine.weights.export(out / "initial")
    batch = engine.score(engine.batch_from_root(read_rollouts(rollouts, 0) if is_root else None))
    assert batch.old_logprobs_T is not None
    assert batch.old_entropy_T is not None
    report: dict[str, Any] = {"logprobs": batch.old_logprobs_T.tolist(), "entropy": batch.old_entropy_T.tolist()}
    report["updates"] = update_twice(engine, batch, out, resume)
    engine.weights.export(out / "trained")
    return engine, report


def main() -> None:
    train_in_turn(one_model)


if __name__ == "__main__":
    main()
