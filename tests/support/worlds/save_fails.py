"""A save that cannot be written, on one rank or on all: save_fails CASE.json

Saves step 1, then step 2 where it fails, then loads step 1. Each rank writes OUT/rank-N.json: what the save said, and digests.
"""

from __future__ import annotations

import json
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.config.load import load_run


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    case: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    folder, out = Path(case["folder"]), Path(case["out"])
    config = load_run(None, case["overrides"])

    from tepo_megatron.tasks.data.builtin import resolve_model_path
    from tepo_megatron.trainer.megatron.engine import Engine

    engine = Engine(config, resolve_model_path(config.model.path))
    engine.counters.entropy_noise = 0.25
    before = engine.weights.version(1).digest
    engine.checkpoints.save(folder, step=1, state={})
    engine.counters.entropy_noise = 0.5
    with torch.no_grad():
        for param in engine.policy.params.values():
            param.add_(1.0)
    if case["limited_rank"] == engine.ranks.rank:  # Python ignores the signal, so that the write itself fails
        resource.setrlimit(resource.RLIMIT_FSIZE, (case["limit"], resource.RLIM_INFINITY))
    said = None
    try:
        engine.checkpoints.begin(folder, step=2, state={}, background=case["background"])
        engine.checkpoints.finish()
    except RuntimeError as error:
        said = str(error)
    if case["limited_rank"] == engine.ranks.rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    engine.checkpoints.load(folder / "step_000001")
    if case["limited_rank"] is not None:
        engine.checkpoints.save(folder, step=1, state={})  # in place of the one that is there
    report = {"said": said, "before": before, "after": engine.weights.version(1).digest, "noise": engine.counters.entropy_noise}
    (out / f"rank-{engine.ranks.rank}.json").write_text(json.dumps(report))
    engine.close()


if __name__ == "__main__":
    main()
