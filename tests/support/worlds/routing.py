"""What every rank of a test of rollout routing replay does; started by torchrun: routing CASE.json.

Takes one model and split after the other: scores with the recorded experts and without, makes one step with them, and saves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.sampler.rollout_file import read_rollouts
from tests.support.model_worlds import train_in_turn
from tests.support.worlds.models import MeanSurprise


def one_model(config: RunConfig, rollouts: Path, out: Path, resume: str | None) -> tuple[Any, dict[str, Any]]:
    """Everything that the tests look at. Returns the engine and its report."""
    from tepo_megatron.trainer.megatron.engine import Engine

    engine = Engine(config, Path(config.model.path), MeanSurprise())
    is_root = engine.ranks.rank == 0
    batch = engine.batch_from_root(read_rollouts(rollouts / Path(config.model.path).name, 0) if is_root else None)
    own = engine.score(batch.with_(routed_experts_T=None))
    without = engine.take_routing_metrics()
    replayed = engine.score(batch)
    assert own.old_logprobs_T is not None
    assert replayed.old_logprobs_T is not None
    report: dict[str, Any] = {
        "own": own.old_logprobs_T.tolist(),
        "replayed": replayed.old_logprobs_T.tolist(),
        "without": without,
    }
    result = engine.update(replayed)
    report["update"] = [result.loss, result.grad_norm]
    report["routing"], report["nothing"] = engine.take_routing_metrics(), engine.take_routing_metrics()
    engine.checkpoints.save(out / "checkpoints", step=1, state={})
    return engine, report


def main() -> None:
    train_in_turn(one_model)


if __name__ == "__main__":
    main()
