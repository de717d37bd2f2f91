"""What every rank of a memory test does: two optimizer steps on the engine, and by how much the process grew at the second.

The measure is the operating system's: the peak of the resident set during the second step, when Adam's states exist, less the
resident set just before the engine is built. malloc returns freed memory at once, so that it means what is in use.
"""

import ctypes
import gc
import json
import sys
import warnings
from pathlib import Path

from tepo_megatron.config import RunConfig
from tepo_megatron.tools.results import resident_bytes
from tepo_megatron.trainer.megatron.engine import Engine
from tests.support.random_models import draw_rollouts

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


def main() -> None:
    warnings.filterwarnings("ignore")
    for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
        assert ctypes.CDLL(None).mallopt(option, 65536)
    case = json.loads(Path(sys.argv[1]).read_text())
    config = RunConfig.model_validate(case["config"])
    rollouts = draw_rollouts([case["tokens"]] * case["sequences"])
    gc.collect()
    before = resident_bytes("VmRSS")
    engine = Engine(config, Path(config.model.path))
    batch = engine.score(engine.batch_from_root(rollouts))
    engine.update(batch)
    Path("/proc/self/clear_refs").write_text("5")
    engine.update(batch)
    growth = resident_bytes("VmHWM") - before
    Path(case["out"], f"rank{engine.ranks.rank}.json").write_text(json.dumps(growth))
    engine.close()
