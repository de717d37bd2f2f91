"""Counts parameters of every rank's real Megatron model, without memory, GPU and world.

python -m tepo_megatron.trainer.megatron.model.parameter_count < REQUEST.json

REQUEST.json has ``spec`` (ModelSpec) and ``parallel`` (ParallelConfig). Prints [pp_rank][tp_rank] counts.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from pydantic import TypeAdapter

from tepo_megatron.config import EngineConfig, ModelConfig, ParallelConfig
from tepo_megatron.trainer.megatron.model.model import LOCAL, build_model, transformer_config
from tepo_megatron.trainer.megatron.parallel.platform import Platform, Ranks, select_platform
from tepo_megatron.weights.architecture import ModelSpec


def _count_rank(spec: ModelSpec, engine: EngineConfig, platform: Platform, rank: int) -> int:
    """Joins torch's ``fake`` world: no other may exist here."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend; torch has no public way to it

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=engine.parallel.world_size)
    try:
        ranks = Ranks.split(engine.parallel, gloo=False)
        megatron = transformer_config(spec, ModelConfig(dtype="bfloat16"), engine, platform, LOCAL)
        megatron = dataclasses.replace(megatron, perform_initialization=False)
        with platform.megatron():
            tensor_parallel.model_parallel_cuda_manual_seed(0)
            with torch.device("meta"):
                chunks = [build_model(spec, megatron, ranks, LOCAL, number) for number in range(ranks.vpp)]
        return sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def main() -> None:
    warnings.filterwarnings("ignore")
    request: dict[str, Any] = json.load(sys.stdin)
    spec = TypeAdapter(ModelSpec).validate_python(request["spec"])
    parallel = ParallelConfig.model_validate(request["parallel"])
    engine = EngineConfig(platform="cpu", parallel=parallel)
    platform, stage = select_platform(engine), parallel.tp * parallel.cp * parallel.dp
    counts = [
        [_count_rank(spec, engine, platform, pp_rank * stage + tp_rank) for tp_rank in range(parallel.tp)]
        for pp_rank in range(parallel.pp)
    ]
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main()
