"""Trains one step on two pipeline stages with full recomputation, once with all CPU patches and once without each:
patch_probe MODEL.

Prints a JSON object: which case → the first error, or null. Cases are forked from one process that has imported Megatron once.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tepo_megatron.config import EngineConfig, ParallelConfig, RunConfig, TrainConfig
from tepo_megatron.engine import platform, platform_cpu
from tepo_megatron.engine.engine import Engine
from tepo_megatron.types import Rollout, WeightsVersion

WORLD = 2
MODE = "torch function mode"


def train_one_step(model: Path) -> None:
    config = RunConfig(
        engine=EngineConfig(parallel=ParallelConfig(pp=2), recompute="full", micro_batch_tokens=8),
        train=TrainConfig(steps=1, minibatches=1),
    )
    engine = Engine(config, model)
    rollouts = [
        Rollout("p", 0, (3, 4), (5, 6, 7), (-1.0, -1.0, -1.0), "stop", WeightsVersion(0), reward=float(reward))
        for reward in (0, 1, 1)
    ]
    engine.update(engine.score(engine.batch_from_root(rollouts)))


def without(case: str) -> None:
    """Takes the case's patch out of what ``install`` will do."""
    every = platform_cpu.patches()
    platform_cpu.patches = lambda: [patch for patch in every if patch.key != case]
    if case == MODE:
        platform.platform_cpu.cuda_means_cpu = contextlib.nullcontext


def rank_main(case: str, rank: int, folder: str, model: Path) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ["WORLD_SIZE"] = str(WORLD)
    error = None
    try:
        without(case)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
        train_one_step(model)
    except Exception as caught:
        error = f"{type(caught).__name__}: {str(caught)[:200]}"
    Path(folder, f"rank{rank}.json").write_text(json.dumps(error))
    os._exit(0 if error is None else 1)  # without waiting for a peer that may hang


def run_case(case: str, model: Path) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for rank in range(WORLD):
            if (child := os.fork()) == 0:
                rank_main(case, rank, folder, model)
            children[child] = rank
        while children:
            child, status = os.wait()
            rank = children.pop(child, None)
            if rank is not None and status:
                for other in children:
                    os.kill(other, 9)
                    os.waitpid(other, 0)
                report = Path(folder, f"rank{rank}.json")
                return json.loads(report.read_text()) if report.exists() else f"died with status {status}"
        return None


if __name__ == "__main__":
    cases = ["none", MODE, *(patch.key for patch in platform_cpu.patches())]
    print(json.dumps({case: run_case(case, Path(sys.argv[1])) for case in cases}))
