"""``tepo bench step``: optimizer steps under one FP8 recipe beside another: time, memory, and how far the learning differs."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

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

WARM_UP = 3
"""Steps whose time does not count: the first ones compile, allocate, and gather FP8's history."""


@dataclass(frozen=True)
class Setting:
    """What is trained on what: ``sequences`` responses of ``length`` tokens."""

    size: str
    steps: int
    sequences: int
    length: int
    dtype: str
    micro_batch_tokens: int

    def run_config(self, recipe: str) -> dict[str, Any]:
        """The run's configuration, as YAML would give it."""
        return {
            "model": {"dtype": self.dtype},
            "engine": {"micro_batch_tokens": self.micro_batch_tokens, "fp8": {"recipe": recipe}},
            "optimizer": {"lr": 1e-5},
        }


@dataclass(frozen=True)
class Measurement:
    """One recipe; the lists have an entry for each step. ``logprobs``: mean over all response tokens, before the step."""

    recipe: str
    platform: str
    logprobs: list[float]
    grad_norms: list[float]
    score_s: list[float]
    update_s: list[float]
    peak_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def seconds(self) -> float:
        """Of scoring and update, without the first steps."""
        steps = [a + b for a, b in zip(self.score_s, self.update_s, strict=True)]
        return statistics.median(steps[WARM_UP:] or steps)

    def drift(self, other: Measurement) -> float:
        """The largest difference of the two means of log-probs, in nats a token, over all steps."""
        return max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))


def step(
    size: Annotated[str, typer.Option("--size", help="tiny, 1b or 8b: a Llama with random weights.")] = "1b",
    recipes: Annotated[
        str, typer.Option("--recipes", help="Values of engine.fp8.recipe, separated by commas; the first is what others meet.")
    ] = "none,tensorwise,blockwise",
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps, all on the same rollouts.", min=1)] = 50,
    sequences: Annotated[int, typer.Option("--sequences", help="Responses, in groups of 4.", min=4)] = 16,
    length: Annotated[int, typer.Option("--length", help="Tokens of each response.", min=1)] = 1024,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16 or float32.")] = "bfloat16",
    micro_batch_tokens: Annotated[int, typer.Option("--micro-batch-tokens", help="As engine.micro_batch_tokens.")] = 8192,
    output: Annotated[Path, typer.Option("--output", help="Folder for the results.")] = Path("benchmarks/results"),
) -> None:
    """Time and memory of scoring and updating a random model, for one recipe after the other, and what becomes of the policy.

    Runs where engine.platform says (a GPU if there is one), on one rank.

    [dim]tepo bench step --size 1b --recipes none,blockwise[/]

    [dim]tepo bench step --size tiny --recipes none --dtype float32 --steps 5[/]
    """
    from tepo_megatron.bench.report import markdown, print_table, write_report

    setting = Setting(size, steps, sequences, length, dtype, micro_batch_tokens)
    results = run(setting, recipes.split(","))
    rows = [_cells(row, results[0], setting) for row in results]
    print_table(_COLUMNS, rows)
    record = {"setting": asdict(setting), "results": [row.as_dict() for row in results]}
    paths = write_report(output, f"step-{size}-{results[0].platform}", record, markdown(_COLUMNS, rows), note=f"{steps} steps")
    typer.echo(f"wrote {' and '.join(str(path) for path in paths)}")


def run(setting: Setting, recipes: Sequence[str]) -> list[Measurement]:
    """Every recipe in a process of its own, on the same weights and rollouts.

    Raises ValueError for an unknown size, a number of sequences that makes no groups, or a recipe that the config refuses.
    """
    from torch.multiprocessing.spawn import start_processes

    from tepo_megatron.bench.step_run import GROUP, make_model, worker
    from tepo_megatron.config import RunConfig

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
            results.append(Measurement(**json.loads(out.read_text())))
    return results


_COLUMNS = ("recipe", "s / step", "× first", "tokens/s", "peak GiB", "log-prob, first → last step", "largest difference, nats")


def _cells(row: Measurement, first: Measurement, setting: Setting) -> tuple[str, ...]:
    return (
        row.recipe,
        f"{row.seconds:.3f}",
        f"{row.seconds / first.seconds:.2f}",
        f"{setting.sequences * setting.length / row.seconds:.0f}",
        f"{row.peak_bytes / 2**30:.2f}",
        f"{row.logprobs[0]:.4f} → {row.logprobs[-1]:.4f}",
        "–" if row is first else f"{row.drift(first):.1e}",
    )
