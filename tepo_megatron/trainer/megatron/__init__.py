"""The trainer on Megatron-Core; only it and benchmarks import megatron.core."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tepo_megatron.trainer.megatron.gpu import TRANSFORMER_ENGINE as TRANSFORMER_ENGINE  # watches Megatron-Core's first import
from tepo_megatron.trainer.megatron.gpu import check_config as check_config
from tepo_megatron.trainer.megatron.gpu import prepare_process as prepare_process

if TYPE_CHECKING:
    from tepo_megatron.config import RunConfig
    from tepo_megatron.runtime.heartbeat import Heartbeat
    from tepo_megatron.trainer.protocol import Trainer


def make_trainer(
    config: RunConfig, model_dir: Path, *, teachers: Mapping[str, Path], shares_gpus: bool, heartbeat: Heartbeat
) -> Trainer:
    from torch import distributed

    from tepo_megatron.runtime.machine import variable
    from tepo_megatron.trainer.megatron.engine import Engine
    from tepo_megatron.trainer.megatron.parallel.platform import Platform

    is_alone = variable("WORLD_SIZE", 1) == 1 and not distributed.is_initialized()
    try:
        return Engine(config, model_dir, teachers=teachers, shares_gpus=shares_gpus, heartbeat=heartbeat)
    except BaseException:
        if is_alone:  # with several ranks the process ends, and closing NCCL's groups would wait for the others
            Platform.destroy()
        raise
