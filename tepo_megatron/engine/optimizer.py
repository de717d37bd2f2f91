"""Builds Megatron's optimizer and learning-rate schedule from our config."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from tepo_megatron.config import Fp8Config, ModelConfig, OptimizerConfig
from tepo_megatron.engine.collectives import objects_as_json
from tepo_megatron.engine.fp8 import optimizer_options


def build_optimizer(
    config: OptimizerConfig, model: ModelConfig, fp8: Fp8Config, ddp: Sequence[DistributedDataParallel]
) -> MegatronOptimizer:
    """Builds Adam over fp32 master weights (the parameters themselves if they are fp32). Every rank calls."""
    with objects_as_json(next(ddp[0].parameters()).device):
        return get_megatron_optimizer(
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
            ),
            list(ddp),
        )


def build_schedule(config: OptimizerConfig, optimizer: MegatronOptimizer, *, total_steps: int) -> OptimizerParamScheduler:
    """Builds the schedule: linear warm-up, then constant, linear or cosine until ``total_steps`` optimizer steps.

    Call its ``step`` before the optimizer's, so that the first update has a learning rate above 0.
    """
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
