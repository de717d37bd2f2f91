"""What every rank of an architecture test does; started by torchrun: architectures_world.py CASE.json.

Takes one model and layout after the other: exports what was loaded, scores, trains a step, saves and exports.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.rollout.record import read_rollouts


def one_model(config: RunConfig, rollouts: Path, out: Path) -> Any:
    """Everything that the tests look at, below ``out``. Returns the engine."""
    from tepo_megatron.engine.engine import Engine

    engine = Engine(config, Path(config.model.path))
    is_root = engine.ranks.rank == 0
    engine.export(out / "initial")
    batch = engine.score(engine.share(read_rollouts(rollouts, 0) if is_root else None))
    assert batch.old_logprobs_T is not None
    assert batch.old_entropy_T is not None
    if is_root:
        scores = {"logprobs": batch.old_logprobs_T.tolist(), "entropy": batch.old_entropy_T.tolist()}
        (out / "scores.json").write_text(json.dumps(scores))
    engine.update(batch)
    engine.save(out / "checkpoints", step=1, state={})
    engine.export(out / "trained")
    return engine


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    case: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    engine: Any = None
    for run in case["runs"]:
        if engine is not None:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()  # the next engine splits the same ranks again
        engine = one_model(RunConfig.model_validate(run["config"]), Path(case["rollouts"]), Path(run["out"]))
    engine.close()


if __name__ == "__main__":
    main()
