"""Makes Megatron trainers; imports Megatron only then."""

from __future__ import annotations

from pathlib import Path

from tepo_megatron.config import RunConfig
from tepo_megatron.runtime.heartbeat import Heartbeat
from tepo_megatron.trainer.megatron.gpu import check_states, set_connections, set_interface
from tepo_megatron.trainer.protocol import Trainer
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts import check_trainer_split


def prepare_process(config: RunConfig) -> None:
    set_interface(config.rollout.server.interface)
    set_connections(config.engine.parallel)


def check_config(config: RunConfig, spec: ModelSpec, *, on_gpu: bool) -> None:
    check_trainer_split(spec, config.engine.parallel)
    spec.check_recompute(config.engine.recomputed, transformer_engine=on_gpu and config.engine.layers != "local")
    spec.check_balance(config.engine.moe_balance.kind)
    check_states(config.optimizer, on_gpu=on_gpu)


def make_trainer(config: RunConfig, model_dir: Path, *, shares_gpus: bool, heartbeat: Heartbeat) -> Trainer:
    from tepo_megatron.trainer.megatron.engine import Engine

    return Engine(config, model_dir, shares_gpus=shares_gpus, heartbeat=heartbeat)
