"""One process of ``tepo bench recipes``: optimizer steps of a random model on random rollouts."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.tools.bench.settings import RecipeMeasurement, RecipeSetting
from tepo_megatron.weights.architecture import ModelSpec, model_spec
from tepo_megatron.weights.layouts import tensor_shapes
from tepo_megatron.weights.storage.hf_folder import write_model

GROUP, PROMPT = 4, 16
"""Samples of a prompt, and its tokens."""

STD = 0.02


def make_model(folder: Path, description: Mapping[str, Any]) -> None:
    """Write a Hugging Face folder of random bf16 weights, norms 1, drawn on the GPU if there is one."""
    source = folder.with_name(folder.name + "-description")
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(description))
    write_model(folder, _random_weights(model_spec(description, "the benchmark's model")), source=source, dtype=torch.bfloat16)


def _random_weights(spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in tensor_shapes(spec).items():
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
        yield name, tensor.fill_(1) if len(shape) == 1 else tensor.normal_(std=STD, generator=generator)


def make_rollouts(setting: RecipeSetting, vocab_size: int) -> list[Rollout]:
    """Random responses; every second one is rewarded."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab_size, (setting.sequences, PROMPT + setting.length), generator=generator).tolist()
    return [
        Rollout(
            problem_id=f"group {number // GROUP}",
            group=number // GROUP,
            prompt_ids=tuple(ids[:PROMPT]),
            response_ids=tuple(ids[PROMPT:]),
            sampler_logprobs=(0.0,) * setting.length,
            finish_reason="length",
            versions=WeightsVersion(0),
            reward=float(number % 2),
        )
        for number, ids in enumerate(tokens)
    ]


def worker(_: int, setting: RecipeSetting, recipe: str, folder: Path, out: Path) -> None:
    out.write_text(json.dumps(asdict(measure(setting, recipe, folder))))


def measure(setting: RecipeSetting, recipe: str, folder: Path) -> RecipeMeasurement:
    from tepo_megatron.trainer.megatron.engine import Engine

    engine = Engine(RunConfig.model_validate(setting.run_config(recipe)), folder)
    rollouts = make_rollouts(setting, engine.spec.vocab_size)
    logprobs, grad_norms, score_s, update_s = [], [], [], []
    for _ in range(setting.steps):
        batch, seconds = _timed(lambda: engine.score(engine.batch_from_root(rollouts)))
        assert batch.old_logprobs_T is not None
        logprobs.append(float(batch.old_logprobs_T[batch.loss_mask_T].double().mean()))
        score_s.append(seconds)
        result, seconds = _timed(lambda batch=batch: engine.update(batch))
        grad_norms.append(result.grad_norm)
        update_s.append(seconds)
    platform = engine.platform.kind
    engine.close()
    return RecipeMeasurement(recipe, platform, logprobs, grad_norms, score_s, update_s, _peak_bytes(platform))


def _timed(work: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def _peak_bytes(platform: str) -> int:
    return (
        torch.cuda.max_memory_allocated() if platform == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
