"""Counts the parameters of every rank's real Megatron model, without memory, GPU and world.

python -m tepo_megatron.trainer.megatron.parameter_count < REQUEST.json

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

from tepo_megatron.config import EngineConfig, ModelConfig, ParallelConfig
from tepo_megatron.trainer.megatron.model.model import LOCAL, build_model, transformer_config
from tepo_megatron.trainer.megatron.platform import Platform, Ranks, select_platform
from tepo_megatron.weights.architecture import Experts, ModelSpec, RopeScaling


def _count_parameters(spec: ModelSpec, parallel: ParallelConfig) -> list[list[int]]:
    """Joins torch's ``fake`` world: this process must not be in a world."""
    engine = EngineConfig(platform="cpu", parallel=parallel)
    platform = select_platform(engine)
    stage = parallel.tp * parallel.cp * parallel.dp
    return [
        [_count_rank(spec, engine, platform, pp_rank * stage + tp_rank) for tp_rank in range(parallel.tp)]
        for pp_rank in range(parallel.pp)
    ]


def _count_rank(spec: ModelSpec, engine: EngineConfig, platform: Platform, rank: int) -> int:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend; torch has no public way to it

    parallel = engine.parallel
    world = parallel.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        parallel_state.initialize_model_parallel(
            parallel.tp,
            parallel.pp,
            virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
            context_parallel_size=parallel.cp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=parallel.etp,
            create_gloo_process_groups=False,
        )
        ranks = Ranks(
            rank=rank,
            world=world,
            tp=parallel.tp,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            pp=parallel.pp,
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            dp=parallel.dp,
            dp_rank=0,
            cp=parallel.cp,
            cp_rank=0,
            tp_group=None,
            vpp=parallel.vpp,
            cp_group=None,
        )
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
    scaling = request["spec"].pop("rope_scaling")
    experts = request["spec"].pop("experts")
    spec = ModelSpec(
        **request["spec"],
        rope_scaling=RopeScaling(**scaling) if scaling else None,
        experts=Experts(**experts) if experts else None,
    )
    json.dump(_count_parameters(spec, ParallelConfig.model_validate(request["parallel"])), sys.stdout)


if __name__ == "__main__":
    main()
