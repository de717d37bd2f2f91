"""Compares optimizer steps under FP8 recipes: time, memory, and differences between the policies."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tepo_megatron.tools.bench.settings import RecipeMeasurement, RecipeSetting
from tepo_megatron.tools.results import markdown, write_report

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_LLAMA,
        **{"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 96},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
    },
    "1b": {
        **_LLAMA,
        **{"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072},
        **{"tie_word_embeddings": True, "rope_parameters": {**_LLAMA3, "factor": 32.0}},
    },
    "8b": {
        **_LLAMA,
        **{"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072},
        **{"rope_parameters": {**_LLAMA3, "factor": 8.0}},
    },
}
"""``config.json`` of the models: shapes of Llama 3.2 1B and Llama 3.1 8B."""


def run(setting: RecipeSetting, recipes: Sequence[str]) -> list[RecipeMeasurement]:
    """Measure each recipe in its own process, on the same weights and rollouts.

    Raises ValueError for an unknown size, a number of sequences that does not fill groups, or a recipe that the config
    refuses.
    """
    from torch.multiprocessing.spawn import start_processes

    from tepo_megatron.config import RunConfig
    from tepo_megatron.tools.bench.recipe_run import GROUP, make_model, worker

    if setting.size not in SIZES:
        raise ValueError(f"--size {setting.size} is unknown; known: {', '.join(SIZES)}")
    if setting.sequences % GROUP:
        raise ValueError(f"--sequences {setting.sequences} must be a multiple of {GROUP}, the size of a group")
    for recipe in recipes:
        RunConfig.model_validate(setting.run_config(recipe))
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch) / "model", SIZES[setting.size])
        for recipe in recipes:
            out = Path(scratch) / f"{recipe}.json"
            start_processes(worker, args=(setting, recipe, Path(scratch) / "model", out), nprocs=1, start_method="spawn")
            results.append(RecipeMeasurement(**json.loads(out.read_text())))
    return results


COLUMNS = ("recipe", "s / step", "× first", "tokens/s", "peak GiB", "log-prob, first → last step", "largest difference, nats")


def cells(row: RecipeMeasurement, first: RecipeMeasurement, setting: RecipeSetting) -> tuple[str, ...]:
    return (
        row.recipe,
        f"{row.seconds:.3f}",
        f"{row.seconds / first.seconds:.2f}",
        f"{setting.sequences * setting.length / row.seconds:.0f}",
        f"{row.peak_bytes / 2**30:.2f}",
        f"{row.logprobs[0]:.4f} → {row.logprobs[-1]:.4f}",
        "–" if row is first else f"{row.drift(first):.1e}",
    )


def write_results(results: Sequence[RecipeMeasurement], folder: Path, setting: RecipeSetting) -> tuple[Path, Path]:
    """Write ``recipes-<size>-<platform>.json`` and ``.md``."""
    record = {"setting": asdict(setting), "results": [asdict(row) for row in results]}
    table = markdown(COLUMNS, [cells(row, results[0], setting) for row in results])
    stem = f"recipes-{setting.size}-{results[0].platform}"
    return write_report(folder, stem, record, table, note=f"{setting.steps} steps")
