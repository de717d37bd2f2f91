"""Compares `sync` and `overlap` on heavy-tailed lengths: seconds per trained response token, and idle shares.

    python -m scripts.studies.compare_schedules --repeats 3

A constructed model ends a response with a probability set by the prompt's first digit: one prompt in ten has responses twenty
times as long. Schedules alternate with equal problems and steps; an overlapped run's unfinished samples are time without
tokens.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.studies.options import study_parser
from tepo_megatron.run.metrics import read_metrics
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tepo_megatron.tools.results import Report, Table
from tepo_megatron.weights.architecture import read_model_spec
from tepo_megatron.weights.table import tensor_shapes

_LONG, _SHORT = "9", "1"
_EVERY = 10
_CONSTANT, _IS_CLASS, _IS_LONG, _IS_SHORT, _TO_LONG, _TO_SHORT = range(6)
"""Coordinates of the hidden state; attention writes the last two."""


def _make_model(folder: Path, *, mean_long: float, mean_short: float) -> Path:
    """Lengths are geometric with these means."""
    source = resolve_model_path("builtin:tiny")
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    spec, tokenizer = read_model_spec(folder), load_tokenizer(folder)
    tensors = {name: torch.zeros(shape) for name, shape in tensor_shapes(spec).items()}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.fill_(1.0)
    long, short = (int(tokenizer.prompt_ids(digit)[-1]) for digit in (_LONG, _SHORT))
    _attend(tensors, config, long, short)
    end, head = tokenizer.eos_ids[0], tensors["lm_head.weight"]
    # The final norm leaves two equal coordinates: the constant, and one of those that the attention writes.
    size = (config["hidden_size"] / 2) ** 0.5
    for coordinate, mean in ((_TO_LONG, mean_long), (_TO_SHORT, mean_short)):
        others = config["vocab_size"] - 3
        head[end, coordinate] = float(torch.tensor(others / (mean - 1)).log()) / size
    for never in (long, short):
        head[never, _CONSTANT] = -30 / size
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _attend(tensors: dict[str, Tensor], config: dict[str, Any], long: int, short: int) -> None:
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, _CONSTANT] = 1.0
    embedding[long, [_IS_CLASS, _IS_LONG]] = 1.0
    embedding[short, [_IS_CLASS, _IS_SHORT]] = 1.0
    layer = "model.layers.0.self_attn."
    slow = config["head_dim"] // 2 - 1  # the coordinate that the rotation by position moves least
    tensors[layer + "q_proj.weight"][slow, _CONSTANT] = 2.0
    tensors[layer + "k_proj.weight"][slow, _IS_CLASS] = 2.0
    tensors[layer + "v_proj.weight"][0, _IS_LONG] = 1.0
    tensors[layer + "v_proj.weight"][1, _IS_SHORT] = 1.0
    value = (config["hidden_size"] / 3) ** 0.5  # a digit has three coordinates that are 1, before the norm
    tensors[layer + "o_proj.weight"][_TO_LONG, 0] = 1 / value
    tensors[layer + "o_proj.weight"][_TO_SHORT, 1] = 1 / value


def _write_problems(path: Path, count: int) -> Path:
    with path.open("w") as file:
        for number in range(count):
            digit = _LONG if number % _EVERY == 0 else _SHORT
            rest = "".join(str(2 + int(item)) for item in oct(number)[2:].replace("7", "6"))
            file.write(json.dumps({"id": f"p{number}", "prompt": f"{digit}+{rest}=", "answer": "0"}) + "\n")
    return path


@dataclass(frozen=True)
class _Measured:
    seconds: float
    tokens: float
    idle_trainer: float
    idle_servers: float
    dropped: float

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens


def _run_schedule(schedule: str, model: Path, problems: Path, output: Path, args: argparse.Namespace) -> _Measured:
    settings = [f"model.path={model}", f"data.train={problems}", f"output={output}", f"train.schedule={schedule}"]
    settings += [f"rollout.prompts_per_step={args.prompts}", f"rollout.samples_per_prompt={args.samples}"]
    settings += [f"rollout.sampling.max_new_tokens={args.longest}", f"train.steps={args.steps}", "evaluate.every=0"]
    settings += ["objective.mismatch.kind=truncate", "optimizer.lr=1e-12", "optimizer.warmup_steps=0"]
    settings += ["engine.parallel.tp=1", "engine.parallel.sequence_parallel=false"]
    settings += ["log.progress=plain", "log.tensorboard=false"]
    if schedule == "overlap":
        settings += ["train.stale=keep", f"train.max_staleness={args.staleness}"]
    command = [sys.executable, "-m", "tepo_megatron", "train", "examples/tiny/run.yaml", *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [row for row in read_metrics(output / "metrics.jsonl") if row["step"] > 1]
    seconds = sum(row["time/step"] for row in rows)
    trainer, servers = (
        sum(row[f"idle/{side}"] * row["time/step"] for row in rows) / seconds for side in ("trainer", "servers")
    )
    tokens, dropped = (sum(row.get(name, 0) for row in rows) for name in ("response_tokens", "staleness/dropped"))
    return _Measured(seconds, tokens, trainer, servers, dropped)


def _main() -> None:
    parser = study_parser(
        __doc__,
        repeats=(3, "runs of each schedule, in alternation"),
        steps=(24, "steps of a run"),
        staleness=(4, "train.max_staleness of the overlapped runs"),
        prompts=(32, "prompts of a step"),
        samples=(4, "samples of a prompt"),
        longest=(640, "largest length of a response"),
        mean_long=(320.0, "mean length after a long prompt, uncut"),
        mean_short=(16.0, "mean length after the others"),
    )
    args = parser.parse_args()
    result: dict[str, list[_Measured]] = {"sync": [], "overlap": []}
    with tempfile.TemporaryDirectory(prefix="tepo-schedules-") as name:
        folder = Path(name)
        model = _make_model(folder / "model", mean_long=args.mean_long, mean_short=args.mean_short)
        problems = _write_problems(folder / "problems.jsonl", 4000)
        for repeat in range(args.repeats):
            for schedule, runs in result.items():
                runs.append(_run_schedule(schedule, model, problems, folder / f"{schedule}-{repeat}", args))
                print(schedule, runs[-1], flush=True)
    ratios = [b.per_token / a.per_token for a, b in zip(result["sync"], result["overlap"], strict=True)]
    rows = []
    for schedule, runs in result.items():
        middle = sorted(runs, key=lambda run: run.per_token)[len(runs) // 2]
        times = (f"{middle.seconds:.1f}", f"{1000 * middle.per_token:.3f}", f"{middle.tokens:.0f}")
        rows.append((schedule, *times, f"{middle.idle_trainer:.0%}", f"{middle.idle_servers:.0%}"))
    head = ("schedule", "s, all steps", "ms a token trained on", "tokens trained on", "trainer idle", "servers idle")
    said = f"Seconds a token, overlap ÷ sync, median of {args.repeats} pairs (range): {Report.median_and_range(ratios)}"
    record = {name: value for name, value in vars(args).items() if name != "output"}
    record |= {schedule: [vars(run) for run in runs] for schedule, runs in result.items()} | {"ratios": ratios}
    note = f"{args.prompts} × {args.samples} responses a step, one prompt in {_EVERY} long, k = {args.staleness}"
    Report("schedules-cpu", record, [Table(head, rows, said)], note).show(args.output)


if __name__ == "__main__":
    _main()
