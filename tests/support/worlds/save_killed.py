"""A save beside training that a kill interrupts: save_killed CASE.json

Saves step 1 in the background, and makes an update meanwhile; then begins to save step 2, and is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tepo_megatron.config.load import load_run


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    case: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(case["folder"])
    overrides = [f"output={case['out']}", "engine.parallel.dp=2", "optimizer.distributed=true", "optimizer.lr=1e-3"]
    config = load_run(None, overrides)

    from tepo_megatron.tasks.data.builtin import resolve_model_path
    from tepo_megatron.trainer.megatron import checkpoints
    from tepo_megatron.trainer.megatron.engine import Engine
    from tepo_megatron.weights.storage import stored
    from tests.support.small_llama import draw_rollouts

    write_all = stored._write_all
    writes, goes_on = threading.Event(), threading.Event()

    def write_when_told(handle: int, data: memoryview) -> None:
        writes.set()
        goes_on.wait()
        write_all(handle, data)

    engine = Engine(config, resolve_model_path(config.model.path))
    rollouts = draw_rollouts([5, 9, 7, 12])
    batch = engine.score(engine.batch_from_root(rollouts if engine.ranks.rank == 0 else None))
    before = engine.weights.version(1).digest
    now = [0.0]
    checkpoints.time = SimpleNamespace(monotonic=lambda: now[0])  # type: ignore[assignment, attr-defined]
    stored._write_all = write_when_told
    engine.checkpoints.begin(folder, step=1, state={}, background=True)
    writes.wait()
    engine.update(batch)
    now[0] += 10.0
    assert engine.checkpoints.finish(wait=False) is None, "the disk is slower than an update"
    meanwhile = engine.weights.version(2).digest
    goes_on.set()
    saved = engine.checkpoints.finish()
    assert saved is not None
    assert saved.waited_s < saved.stage_s + saved.write_s
    if engine.ranks.rank == 0:
        Path(case["out"], "report.json").write_text(json.dumps([before, meanwhile]))
    goes_on.clear()
    engine.checkpoints.begin(folder, step=2, state={}, background=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
