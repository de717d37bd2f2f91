"""Runs TRL's GRPO and `tepo train` in alternation and compares their steps. `bash scripts/against_trl.sh` makes both
environments first.

Each round starts every side once, one after the other, on all cores of the machine; a side's step is the median of
its steps but the first two. A ratio compares the sides of one round; the table has the
medians over the rounds, and their extremes.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sizes import SIZES, WARM_UP, Size  # type: ignore[import-not-found]  # beside this file

from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tools.results import Report, Table, markdown
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.storage.hf_folder import write_model
from tepo_megatron.weights.table import tensor_shapes

PHASES = ("step", "rollout", "score", "update", "sync")
SIDES: dict[str, list[str]] = {
    "sync": [],
    "sync, all cores": ["engine.cpu_threads=auto", "rollout.server.cpu_threads=all"],
    "overlap": ["train.schedule=overlap", "train.max_staleness=1", "objective.mismatch={kind: truncate}"],
}
"""Ours, by what a run is given beside the sizes."""


def write_larger_model(folder: Path) -> Path:
    """A random Llama of 25 M parameters with the built-in tokenizer, whose end token is all but impossible."""
    source = folder / "described"
    source.mkdir(parents=True)
    builtin = resolve_model_path("builtin:tiny")
    for path in builtin.iterdir():
        if path.suffix != ".safetensors":
            (source / path.name).write_bytes(path.read_bytes())
    raw = json.loads((builtin / "config.json").read_text())
    raw |= {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64}
    raw |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    (source / "config.json").write_text(json.dumps(raw))
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in tensor_shapes(ModelSpec.of(raw, "config")).items():
        tensors[name] = torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=generator)
    # The first coordinate of every hidden state is large, and the head of the end token looks at it alone.
    tensors["model.embed_tokens.weight"][:, 0] = 1.0
    tensors["lm_head.weight"][:, 0] = 0.0
    tensors["lm_head.weight"][raw["eos_token_id"]] = 0.0
    tensors["lm_head.weight"][raw["eos_token_id"], 0] = -4.0
    write_model(folder / "model", iter(tensors.items()), source=source, dtype=torch.float32)
    return folder / "model"


def run_trl(python: str, model: Path, problems: Path, name: str) -> list[dict[str, float]]:
    threads = os.cpu_count() or 1
    script = Path(__file__).with_name("trl_run.py")
    command = [python, str(script), "--model", str(model), "--problems", str(problems), "--size", name]
    done = _run([*command, "--threads", str(threads)], OMP_NUM_THREADS=str(threads))
    line = next(line for line in done.splitlines() if line.startswith("STEPS "))
    return json.loads(line.removeprefix("STEPS "))


def run_ours(side: str, model: Path, folder: Path, name: str, size: Size, more: Sequence[str]) -> list[dict[str, float]]:
    """One trainer rank and one server."""
    given = [
        f"output={folder}",
        f"model.path={model}",
        "data.train=builtin:addition",
        f"rollout.prompts_per_step={size.prompts}",
        f"rollout.samples_per_prompt={size.samples}",
        f"rollout.sampling.max_new_tokens={size.new_tokens}",
        f"train.steps={size.steps}",
        f"train.minibatches={size.updates}",
        "train.save_every=0",
        "objective.preset=grpo",
        "optimizer.lr=5.0e-5",
        "optimizer.warmup_steps=10",
        "evaluate.every=0",
        "log.progress=plain",
        "log.tensorboard=false",
    ]
    if name == "larger":
        given.append("reward.verifier=sizes:verify_sevens")
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    _run([sys.executable, "-m", "tepo_megatron", "train", *given, *SIDES[side], *more], PYTHONPATH=path)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{phase: row.get(f"time/{phase}", math.nan) for phase in PHASES} for row in rows if row["step"] > 0]


def _run(command: Sequence[str], **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with status {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def counts(side: str, size: Size) -> bool:
    """Whether a run is long enough for a side: under overlap the last steps have nothing more to sample, and would be all."""
    return side != "overlap" or size.steps >= 8


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    counted = rows[WARM_UP:]
    return {phase: statistics.median(row.get(phase, math.nan) for row in counted) for phase in PHASES}


def table(found: dict[str, list[dict[str, dict[str, float]]]]) -> Table:
    rows = []
    for name, rounds in found.items():
        for side in (side for side in rounds[0] if counts(side, SIZES[name])):
            took = {phase: statistics.median(one[side][phase] for one in rounds) for phase in PHASES}
            phases = ["–" if math.isnan(took[phase]) else f"{took[phase]:.2f}" for phase in PHASES]
            ratios = [one[side]["step"] / one["TRL"]["step"] for one in rounds]
            rows.append([name, side, *phases, "1" if side == "TRL" else Report.median_and_range(ratios)])
    columns = ["size", "side", "step, s", "rollout", "score", "update", "sync", "step ÷ TRL's (lowest–highest)"]
    return Table(columns, rows)


def write(folder: Path, trl: str, found: dict[str, list[dict[str, dict[str, float]]]]) -> str:
    """After every round, so that an interrupted comparison leaves the rounds that it made."""
    described = "; ".join(f"{name}: {SIZES[name].description}, rounds: {len(rounds)}" for name, rounds in found.items())
    note = f"TRL {trl} with its own sampler, ours with one trainer rank and one vLLM server; {described}"
    return Report("against-trl", {"note": note, "rounds": found}, [table(found)], note).write(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="Python of an environment with TRL")
    parser.add_argument("--sizes", default=",".join(SIZES), help="of: " + ", ".join(SIZES))
    parser.add_argument("--sides", default=";".join(SIDES), help="ours, of: " + "; ".join(SIDES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("docs/results/data"))
    parser.add_argument("overrides", nargs="*", help="of every run of ours, such as rollout.server.cpu_threads=0|1")
    args = parser.parse_args()
    trl = _run([args.trl_python, "-c", "import importlib.metadata as m; print(m.version('trl'))"]).strip()
    found: dict[str, list[dict[str, dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory(prefix="tepo-against-trl-") as temporary:
        work = Path(temporary)
        problems = work / "problems.jsonl"
        lines = (json.dumps({"prompt": each.prompt, "answer": each.answer}) for each in load_problems("builtin:addition"))
        problems.write_text("\n".join(lines) + "\n")
        models = {"tiny": resolve_model_path("builtin:tiny")}
        for name in args.sizes.split(","):
            size = SIZES[name]
            model = models.get(name) or write_larger_model(work / name)
            for number in range(args.rounds):
                steps: dict[str, Any] = {"TRL": run_trl(args.trl_python, model, problems, name)}
                for side in (side for side in args.sides.split(";") if counts(side, size)):
                    out = work / f"{name}-{number}" / side.replace(", ", "-").replace(" ", "-")
                    steps[side] = run_ours(side, model, out, name, size, args.overrides)
                one = {side: medians(rows) for side, rows in steps.items()}
                found.setdefault(name, []).append(one)
                took = ", ".join(f"{side} {values['step']:.2f} s" for side, values in one.items())
                print(f"{name}, round {number + 1} of {args.rounds}: {took}", flush=True)
                written = write(args.output, trl, found)
    print(f"{markdown(*table(found)[:2])}\n{written}")


if __name__ == "__main__":
    main()
