"""What every rank of a test of truncated sampling does; started by torchrun: truncated CASE.json.

Scores the recorded steps among the tokens that could have been drawn, and the first also among all; makes one step on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.sampler.rollout_file import read_rollouts
from tests.support.model_worlds import train_in_turn
from tests.support.worlds.models import MeanSurprise


def one_model(config: RunConfig, rollouts: Path, out: Path, resume: str | None) -> tuple[Any, dict[str, Any]]:
    """The engine, and everything that the tests look at."""
    from tepo_megatron.trainer.megatron.engine import Engine

    engine = Engine(config, Path(config.model.path), MeanSurprise())
    is_root = engine.ranks.rank == 0
    steps = len(list(rollouts.glob("step_*.jsonl")))
    batches = [engine.batch_from_root(read_rollouts(rollouts, step) if is_root else None) for step in range(steps)]
    scored = [engine.score(batch) for batch in batches]
    whole = engine.score(batches[0].with_(sampling_mask_T=None))
    result = engine.update(scored[0])
    report: dict[str, Any] = {}
    if is_root:
        assert whole.old_logprobs_T is not None
        report = {
            "logprobs": [batch.old_logprobs_T[batch.loss_mask_T].tolist() for batch in scored],
            "entropies": [batch.old_entropy_T[batch.loss_mask_T].tolist() for batch in scored],
            "whole": whole.old_logprobs_T[whole.loss_mask_T].tolist(),
            "update": [result.loss, result.grad_norm],
        }
    return engine, report


def main() -> None:
    train_in_turn(one_model)


if __name__ == "__main__":
    main()
