"""Parts of ``tepo bench gpu``: a command, required packages, and a reader of its figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo_megatron.tools.bench.settings import RecipeMeasurement, ScoreMeasurement

Figures = Callable[[Path, str], Mapping[str, Any]]
"""(folder of the part's results, its output) → figures of the report. Raises ValueError if they are missing."""


@dataclass(frozen=True)
class Part:
    """``command`` follows ``python -m``; ``{out}`` is the part's folder. ``packages``: modules without which it is skipped.
    ``memory_gib``: required of one GPU."""

    name: str
    what: str
    command: tuple[str, ...]
    figures: Figures
    packages: tuple[str, ...] = ()
    memory_gib: float = 0
    limit_s: int = 600


def pytest_figures(_: Path, printed: str) -> Mapping[str, Any]:
    """Counts in pytest's last line. No passed test is an error."""
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|error|errors|skipped)\b", printed)}
    if not counts.get("passed"):
        raise ValueError(f"no test passed: {counts or 'pytest printed no counts'}")
    return counts


def _read(folder: Path, pattern: str) -> dict[str, Any]:
    result = sorted(folder.glob(pattern))
    if not result:
        raise ValueError(f"it wrote no {pattern}")
    record: dict[str, Any] = json.loads(result[-1].read_text())
    return record


def score_figures(folder: Path, _: str) -> Mapping[str, Any]:
    """Per shape: Triton's bandwidth over a copy's, and its memory over the logits'."""
    figures = {}
    for row in (ScoreMeasurement(**row) for row in _read(folder, "scores-cuda*.json")["results"]):
        if "triton" in row.method.lower() and row.copy_gbps:
            of_a_copy = [round(gbps / row.copy_gbps, 2) for gbps in row.gbps]
            figures[f"V {row.vocab}, {row.method}"] = {"of a copy": of_a_copy, "peak extra": round(row.peak_extra, 3)}
    if not figures:
        raise ValueError("it measured no Triton kernels")
    return figures


def step_figures(folder: Path, _: str) -> Mapping[str, Any]:
    """Per recipe: time, memory, largest difference of mean log-prob from the first recipe's."""
    results = [RecipeMeasurement(**row) for row in _read(folder, "recipes-*-cuda.json")["results"]]
    return {
        row.recipe: {
            "s / step": round(row.seconds, 4),
            "× first": round(row.seconds / results[0].seconds, 3),
            "peak GiB": round(row.peak_bytes / 2**30, 2),
            "nats from first": row.drift(results[0]),
        }
        for row in results
    }


def _run_figures(folder: Path, _: str) -> Mapping[str, Any]:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = ("time/step", "time/sync", "canary/max_logprob_gap", "mismatch/kl", "memory/peak_gib")
    return {"steps": len(rows) - 1} | {name: rows[-1][name] for name in expected if name in rows[-1]}


def _steps(size: str, recipes: str, memory_gib: float) -> Part:
    command = ("tepo_megatron", "bench", "recipes", "--size", size, "--recipes", recipes, "--steps", "50", "--output", "{out}")
    what = f"50 optimizer steps of a {size.upper()} Llama, bf16 beside FP8"
    return Part(f"step {size}", what, command, step_figures, ("transformer_engine",), memory_gib, limit_s=900)


_TINY_ON_GPU = (
    *("engine.platform=cuda", "engine.parallel.tp=1", "engine.parallel.sequence_parallel=false", "model.dtype=bfloat16"),
    *("train.steps=3", "evaluate.every=0", "rollout.server.placement=colocated"),
)

_REDUCED = tuple(
    f"optimizer.{field}" for field in ("store_param_remainders=true", "exp_avg_dtype=bfloat16", "exp_avg_sq_dtype=bfloat16")
)


def _lean(name: str, what: str, *settings: str) -> Part:
    run = ("tepo_megatron", "train", "examples/tiny/run.yaml", "output={out}/run", *_TINY_ON_GPU)
    packages = ("vllm", "transformer_engine")
    return Part(
        name, f"three steps of TEPO with {what}", (*run, "optimizer.distributed=true", *settings), _run_figures, packages
    )


PARTS = (
    Part(
        "tests",
        "pytest -m gpu",
        ("pytest", "-m", "gpu", "-q", "tests/gpu"),
        pytest_figures,
        ("pytest", "hypothesis"),
        limit_s=1800,
    ),
    Part(
        "kernels",
        "log-prob and entropy, bytes moved over the bandwidth of a copy",
        ("tepo_megatron", "bench", "scores", "--device", "cuda", "--output", "{out}"),
        score_figures,
        ("triton",),
    ),
    Part(
        "experts",
        "experts in Transformer Engine's grouped products in bf16 and FP8, and split over two GPUs where there are two",
        ("pytest", "-m", "gpu", "-q", "tests/gpu/test_experts_gpu.py"),
        pytest_figures,
        ("pytest", "transformers", "transformer_engine"),
        limit_s=900,
    ),
    _steps("1b", "none,tensorwise,delayed,blockwise", memory_gib=40),
    _steps("8b", "none,blockwise", memory_gib=160),
    _lean("lean", "optimizer states in fewer bits", *_REDUCED),
    _lean("lean host", "optimizer states on the host", "optimizer.offload_fraction=1.0"),
    Part(
        "sync",
        "three steps of TEPO with a server on the same GPU: weights handed over, checked by digests and canary",
        ("tepo_megatron", "train", "examples/tiny/run.yaml", "output={out}/run", *_TINY_ON_GPU),
        _run_figures,
        ("vllm", "transformer_engine"),
    ),
    Part(
        "lora",
        "the same with LoRA: layers of Transformer Engine that compute with merged weights",
        ("tepo_megatron", "train", "examples/tiny/run.yaml", "output={out}/run", *_TINY_ON_GPU, "model.lora.rank=8"),
        _run_figures,
        ("vllm", "transformer_engine"),
    ),
)
