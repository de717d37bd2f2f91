"""Optimizer steps under FP8 recipes (``tepo bench recipes``), and all benchmarks' random models."""

from __future__ import annotations

import json
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.tools.bench.step_rank import make_rollouts
from tepo_megatron.tools.results import Report, Table, in_processes
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.storage.hf_folder import write_model
from tepo_megatron.weights.table import tensor_shapes

GROUP = 4  # samples of a prompt
_WARM_UP = 3  # steps without times: they compile, allocate, and fill FP8's history


def llama(layers: int, hidden: int, ffn: int, vocab: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5},
        **{"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "vocab_size": vocab},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 4096, **more},
    }


_LLAMA3: dict[str, Any] = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
_1B = {"head_dim": 64, "tie_word_embeddings": True, "rope_parameters": {**_LLAMA3, "factor": 32.0}}
_8B = {"head_dim": 128, "rope_parameters": {**_LLAMA3, "factor": 8.0}}
SIZES = {
    "tiny": llama(2, 64, 128, 96, 4, 2),
    "1b": llama(16, 2048, 8192, 128256, 32, 8, max_position_embeddings=131072, **_1B),
    "8b": llama(32, 4096, 14336, 128256, 32, 8, max_position_embeddings=131072, **_8B),
}  # shapes of Llama 3.2 1B and Llama 3.1 8B


def make_model(folder: Path, description: Mapping[str, Any], *, std: float = 0.02, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes random weights (norms 1), drawn on the GPU if there is one."""
    source = folder.with_name(folder.name + "-description")
    source.mkdir(parents=True, exist_ok=True)
    (source / "config.json").write_text(json.dumps(description))
    shapes = tensor_shapes(ModelSpec.of(description, "the benchmark's model"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, shape in shapes.items():
            tensor = torch.empty(shape, dtype=dtype, device=device)
            yield name, tensor.fill_(1) if len(shape) == 1 else tensor.normal_(std=std, generator=generator)

    write_model(folder, weights(), source=source, dtype=dtype)


@dataclass(frozen=True)
class RecipeSetting:
    size: str
    steps: int
    sequences: int
    length: int
    dtype: str
    micro_batch_tokens: int
    overrides: tuple[str, ...] = ()  # of the run's configuration

    def run_config(self, recipe: str) -> RunConfig:
        settings = (f"model.dtype={self.dtype}", f"engine.micro_batch_tokens={self.micro_batch_tokens}", "optimizer.lr=1e-5")
        return load_run(None, [*settings, f"engine.fp8.recipe={recipe}", *self.overrides])

    def run(self, recipes: Sequence[str]) -> list[RecipeMeasurement]:
        """Raises ValueError for a refused recipe."""
        if self.size not in SIZES:
            raise ValueError(f"--size {self.size} is unknown; known: {', '.join(SIZES)}")
        if self.sequences % GROUP:
            raise ValueError(f"--sequences {self.sequences} must be a multiple of {GROUP}, the size of a group")
        for recipe in recipes:
            self.run_config(recipe)
        with tempfile.TemporaryDirectory() as scratch:
            model = Path(scratch) / "model"
            make_model(model, SIZES[self.size])
            return [RecipeMeasurement(**in_processes(_measure, 1, self, recipe, model)) for recipe in recipes]

    def report(self, results: Sequence[RecipeMeasurement]) -> Report:
        first = results[0]
        rows = [
            {
                "recipe": row.recipe,
                "s / step": f"{row.seconds:.3f}",
                "× first": f"{row.seconds / first.seconds:.2f}",
                "tokens/s": f"{self.sequences * self.length / row.seconds:.0f}",
                "peak GiB": f"{row.peak_bytes / 2**30:.2f}",
                "log-prob, first → last step": f"{row.logprobs[0]:.4f} → {row.logprobs[-1]:.4f}",
                "largest difference, nats": "–" if row is first else f"{row.drift(first):.1e}",
            }
            for row in results
        ]
        record = {"setting": asdict(self), "results": [asdict(row) for row in results]}
        return Report(f"recipes-{self.size}-{first.platform}", record, [Table.of(rows)], f"{self.steps} steps")


@dataclass(frozen=True)
class RecipeMeasurement:
    """Lists have an entry per step. ``logprobs``: means before it."""

    recipe: str
    platform: str
    logprobs: list[float]
    grad_norms: list[float]
    score_s: list[float]
    update_s: list[float]
    peak_bytes: int

    @property
    def seconds(self) -> float:
        steps = [a + b for a, b in zip(self.score_s, self.update_s, strict=True)]
        return statistics.median(steps[_WARM_UP:] or steps)

    def drift(self, other: RecipeMeasurement) -> float:
        """In nats per token."""
        return max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))


def _measure(_: int, setting: RecipeSetting, recipe: str, folder: Path) -> dict[str, Any]:
    from tepo_megatron.trainer.megatron.engine import Engine

    engine = Engine(setting.run_config(recipe), folder)
    platform = engine.platform.kind
    rollouts = make_rollouts([16 + setting.length] * setting.sequences, engine.spec.vocab_size, group=GROUP, prompt=16)
    result = RecipeMeasurement(recipe, platform, [], [], [], [], 0)
    for _ in range(setting.steps):
        batch, seconds = _timed(lambda: engine.score(engine.batch_from_root(rollouts)))
        assert batch.old_logprobs_T is not None
        result.logprobs.append(float(batch.old_logprobs_T[batch.loss_mask_T].double().mean()))
        result.score_s.append(seconds)
        update, seconds = _timed(lambda batch=batch: engine.update(batch))
        result.grad_norms.append(update.grad_norm)
        result.update_s.append(seconds)
    engine.close()
    on_gpu = platform == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**asdict(result), "peak_bytes": peak}


def _timed(work: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - start
