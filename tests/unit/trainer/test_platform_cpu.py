"""The patches that let Megatron run on a CPU: together they are enough, and none is there for nothing."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.config import EngineConfig
from tepo_megatron.trainer.megatron import platform as platform_cpu
from tests.support.launch import run_dist

MODE = "torch function mode"
PATCHES = [patch.key for patch in platform_cpu.Platform.cpu_patches()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    sizes: dict[str, Any] = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    sizes["num_attention_heads"] = 2
    LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


def train_one_step(rank: int, world: int, model: Path, missing: str | None) -> None:
    """Two pipeline stages with full recomputation, and Adam's states on the host; without one of the patches."""
    from tepo_megatron.config import ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
    from tepo_megatron.core.rollout import Rollout, WeightsVersion
    from tepo_megatron.trainer.megatron.engine import Engine

    warnings.filterwarnings("ignore")
    every = platform_cpu.Platform.cpu_patches()
    platform_cpu.Platform.cpu_patches = staticmethod(lambda: [patch for patch in every if patch.key != missing])  # type: ignore[method-assign]
    if missing == MODE:
        platform_cpu.Platform.megatron = lambda self: contextlib.nullcontext()  # type: ignore[method-assign]
    config = RunConfig(
        model=ModelConfig(dtype="bfloat16"),
        optimizer=OptimizerConfig(distributed=True, offload_fraction=0.5),
        engine=EngineConfig(parallel=ParallelConfig(pp=world), recompute="full", micro_batch_tokens=8),
        train=TrainConfig(steps=1, minibatches=1),
    )
    engine = Engine(config, model)
    rollouts = [
        Rollout("p", 0, (3, 4), (5, 6, 7), (-1.0, -1.0, -1.0), "stop", WeightsVersion(0), reward=float(reward))
        for reward in (0, 1, 1)
    ]
    engine.update(engine.score(engine.batch_from_root(rollouts)))


@pytest.mark.slow
def test_with_all_patches_megatron_trains(model: Path) -> None:
    run_dist(2, train_one_step, model, None)


@pytest.mark.slow
@pytest.mark.parametrize("patch", [*PATCHES, MODE])
def test_without_a_patch_megatron_fails(model: Path, patch: str) -> None:
    """If this fails, upstream no longer needs the patch: remove it."""
    with pytest.raises(RuntimeError, match=r"rank [01] of 2 raised:"):
        run_dist(2, train_one_step, model, patch)


def test_a_megatron_that_was_not_tried_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform_cpu, "version", lambda _: "0.17.0")
    with pytest.raises(RuntimeError, match=r"megatron-core 0\.17\.0 was not tried on CPU; install 0\.16\.x"):
        platform_cpu.select_platform(EngineConfig(platform="cpu"))


def test_a_machine_with_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="this machine has a GPU"):
        platform_cpu.select_platform(EngineConfig(platform="cpu"))
