"""Divides the world into process groups."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from tepo_megatron.config import ParallelConfig, RunConfig
from tepo_megatron.runtime.rendezvous import rank_store
from tepo_megatron.trainer.megatron.platform.platform import Platform

_MARGIN_S = 300.0
"""The heartbeat watch reports more, and must end the run first."""

_TIMEOUT = timedelta(seconds=1800 + _MARGIN_S)


def collective_timeout(config: RunConfig) -> timedelta:
    """In a weight update rank 0 may wait for servers while the others wait in a collective."""
    return timedelta(seconds=config.train.hang_timeout_s + config.rollout.server.longest_wait_s + _MARGIN_S)


@dataclass(frozen=True)
class Ranks:
    """Ranks are numbered tp innermost, then cp, dp and pp, as in Megatron.

    ``dp`` ranks compute different sequences, ``cp`` ranks different tokens of the same ones. ``tp_group`` and ``cp_group`` are
    None for size 1.
    """

    rank: int
    world: int
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    dp: int
    dp_rank: int
    cp: int
    cp_rank: int
    tp_group: dist.ProcessGroup | None
    cp_group: dist.ProcessGroup | None
    vpp: int = 1

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def micro_batch_group(self) -> int:
        """The number of micro-batches must be a multiple of this."""
        return self.pp if self.vpp > 1 else 1

    @property
    def last_stage_root(self) -> int:
        """This rank reports for the last stage."""
        return self.tp * self.cp * self.dp * (self.pp - 1)


def initialize(config: ParallelConfig, platform: Platform, *, seed: int, timeout: timedelta = _TIMEOUT) -> Ranks:
    """Joins torchrun's world, or makes a world of one. Every rank calls.

    ``timeout`` limits every collective. Raises ValueError if the world is not tp × pp × cp × dp.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world != config.world_size:
        raise ValueError(
            f"engine.parallel asks for tp {config.tp} × pp {config.pp} × cp {config.cp} × dp {config.dp} = "
            f"{config.world_size} processes, "
            f"but torchrun started {world}; start {config.world_size} or change engine.parallel"
        )
    if not dist.is_initialized():
        if "RANK" in os.environ and (store := rank_store(world, timeout)) is not None:
            rank = int(os.environ["RANK"])
            dist.init_process_group(platform.backend, store=store, rank=rank, world_size=world, timeout=timeout)
        elif "RANK" in os.environ:
            dist.init_process_group(platform.backend, timeout=timeout)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined] # torch exports it without saying so
            dist.init_process_group(platform.backend, store=store, rank=0, world_size=1, timeout=timeout)
    parallel_state.initialize_model_parallel(
        config.tp,
        config.pp,
        virtual_pipeline_model_parallel_size=config.vpp if config.vpp > 1 else None,
        context_parallel_size=config.cp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=config.etp,
    )
    with platform.megatron():
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Ranks(
        rank=dist.get_rank(),
        world=world,
        tp=config.tp,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp=config.pp,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp=config.dp,
        dp_rank=parallel_state.get_data_parallel_rank(),
        cp=config.cp,
        cp_rank=parallel_state.get_context_parallel_rank(),
        tp_group=parallel_state.get_tensor_model_parallel_group() if config.tp > 1 else None,
        cp_group=parallel_state.get_context_parallel_group() if config.cp > 1 else None,
        vpp=config.vpp,
    )


def host_group(platform: Platform, timeout: timedelta = _TIMEOUT) -> dist.ProcessGroup | None:
    """None if torch's default group waits on the host. Every rank calls."""
    return None if platform.backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)


def destroy() -> None:
    """Waits for no rank: after a failure others may be gone."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
