"""Builds Megatron's optimizer and learning-rate schedule from our config."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from tepo_megatron.config import Fp8Config, ModelConfig, OptimizerConfig
from tepo_megatron.trainer.megatron.model.fp8 import optimizer_options
from tepo_megatron.trainer.megatron.platform.collectives import objects_as_json
from tepo_megatron.trainer.megatron.policy.reduced_states import check_states, step_in_parts


def build_optimizer(
    config: OptimizerConfig, model: ModelConfig, fp8: Fp8Config, ddp: Sequence[DistributedDataParallel]
) -> MegatronOptimizer:
    """Every rank calls. Raises ValueError for states in fewer bits without Transformer Engine on a GPU."""
    device = next(ddp[0].parameters()).device
    check_states(config, on_gpu=device.type == "cuda")
    with objects_as_json(device):
        optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=config.clip_grad,
                bf16=model.dtype == "bfloat16",
                use_distributed_optimizer=config.distributed,
                **optimizer_options(fp8),
                **state_options(config, on_gpu=device.type == "cuda"),
            ),
            list(ddp),
        )
    for inner in optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]:
        if inner.optimizer is not None:  # a rank may have nothing to train
            _adapt_steps(inner.optimizer, config, on_gpu=device.type == "cuda")
    if config.offload_fraction:
        gc.collect()  # Megatron makes its hybrid optimizer twice; the first, a reference cycle, has a copy of all weights
    return optimizer


def _adapt_steps(adam: Any, config: OptimizerConfig, *, on_gpu: bool) -> None:
    if config.precision_aware:
        adam.step = partial(step_in_parts, adam, adam.step)
    elif config.offload_fraction and on_gpu:
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        adam.step = partial(_step_with_threads, adam.step, max(1, cores))


def _step_with_threads(step: Callable[[], None], threads: int) -> None:
    """Ranks start with one torch thread, which is enough while a GPU computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        step()
    finally:
        torch.set_num_threads(before)


_STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.uint8}
"""Transformer Engine uses ``uint8`` for FP8 with a scale per tensor."""


def state_options(config: OptimizerConfig, *, on_gpu: bool) -> dict[str, Any]:
    if config.offload_fraction:
        return {
            # On the host all states are fp32. This flag leaves the masters to Adam: without it they stay on the GPU too.
            "use_precision_aware_optimizer": True,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": config.offload_fraction,
            "overlap_cpu_optimizer_d2h_h2d": True,
            "pin_cpu_grads": on_gpu,
            "pin_cpu_params": on_gpu,
        }
    if config.precision_aware:
        return {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": _STATE_DTYPES[config.exp_avg_dtype],
            "exp_avg_sq_dtype": _STATE_DTYPES[config.exp_avg_sq_dtype],
            "store_param_remainders": config.store_param_remainders,
        }
    return {}


def build_schedule(config: OptimizerConfig, optimizer: MegatronOptimizer, *, total_steps: int) -> OptimizerParamScheduler:
    """Call its ``step`` before the optimizer's, so that the first update has a learning rate above 0."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(total_steps, config.warmup_steps + 1),  # Megatron asserts that it is more than the warm-up
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
