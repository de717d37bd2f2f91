"""What every rank of a memory test does: two optimizer steps on the engine, and by how much the process grew at the second.

    memory CASE.json     under torchrun, or alone for a world of one

The measure is the operating system's: the peak of the resident set during the second step, when Adam's states exist, less the
resident set just before the engine is built. malloc must return freed memory at once (MALLOC_MMAP_THRESHOLD_) for it to mean
what is in use.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from pathlib import Path

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.trainer.megatron.engine import Engine
from tests.support.random_models import draw_rollouts


def resident(kind: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (peak since the last reset), in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) * 1024


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    case = json.loads(Path(sys.argv[1]).read_text())
    config = RunConfig.model_validate(case["config"])
    rollouts = draw_rollouts([case["tokens"]] * case["sequences"])
    gc.collect()
    before = resident("VmRSS")
    engine = Engine(config, Path(config.model.path))
    batch = engine.score(engine.batch_from_root(rollouts))
    engine.update(batch)
    Path("/proc/self/clear_refs").write_text("5")
    engine.update(batch)
    growth = resident("VmHWM") - before
    Path(case["out"], f"rank{engine.ranks.rank}.json").write_text(json.dumps(growth))
    engine.close()


if __name__ == "__main__":
    main()
