"""Chooses the trainer; only this file lists the kinds."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tepo_megatron.config import RunConfig
from tepo_megatron.trainer.protocol import Trainer, TrainerKind

if TYPE_CHECKING:
    from tepo_megatron.runtime.heartbeat import Heartbeat
    from tepo_megatron.weights.architecture import ModelSpec

_KINDS = {"megatron": "tepo_megatron.trainer.megatron.start"}  # imported when used


def _kind(name: str) -> TrainerKind:
    if name not in _KINDS:
        raise ValueError(f"there is no trainer {name!r}; it is one of {', '.join(sorted(_KINDS))}")
    return cast(TrainerKind, importlib.import_module(_KINDS[name]))


def prepare_process(config: RunConfig, kind: str = "megatron") -> None:
    """Every rank calls, before any CUDA call."""
    _kind(kind).prepare_process(config)


def check_config(config: RunConfig, spec: ModelSpec, *, on_gpu: bool, kind: str = "megatron") -> None:
    """Raises ValueError for what the trainer cannot train. Starts no process and no CUDA."""
    _kind(kind).check_config(config, spec, on_gpu=on_gpu)


def check_plugins(config: RunConfig) -> None:
    """Raises ValueError if a plugin's loss depends on micro-batches, ranks, the order of sequences, or padding."""
    if not config.objective.plugins:
        return
    from tepo_megatron.core.objective.checking import check_invariance

    parts = len(config.reward.weights) if config.reward.weights else 2
    for rule, problem in check_invariance(config.objective, reward_parts=parts):
        if problem:
            plugins = ", ".join(config.objective.plugins)
            raise ValueError(
                f"the objective, with {plugins}, breaks a rule ({rule}): {problem} ('tepo objective check' tries all rules)"
            )


def make_trainer(
    config: RunConfig, model_dir: Path, *, shares_gpus: bool, heartbeat: Heartbeat, kind: str = "megatron"
) -> Trainer:
    """Every rank calls. Raises ValueError for a model that does not fit the parallel layout.

    ``shares_gpus``: servers and the trainer take turns on the GPUs. ``heartbeat`` starts when the ranks have met.
    """
    return _kind(kind).make_trainer(config, model_dir, shares_gpus=shares_gpus, heartbeat=heartbeat)
