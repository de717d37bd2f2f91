"""Runs every check that needs a GPU (``scripts/gpu_check.sh``)."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tepo_megatron.run.metrics import read_metrics
from tepo_megatron.tools.bench.recipes import RecipeMeasurement
from tepo_megatron.tools.bench.scores import ScoreMeasurement
from tepo_megatron.tools.results import Report, Table

NO_GPU = 3  # exit status without a GPU


@dataclass(frozen=True)
class Part:
    """``command``, then each of ``more``, follows ``python -m``; ``{out}`` is its folder. Skipped without its ``packages``
    or the folder ``recorded``. All commands end within ``limit_s``: a machine that is lent ends one after ten minutes.
    """

    name: str
    what: str
    command: tuple[str, ...]
    figures: Callable[[Path, str], Mapping[str, Any]]  # (folder of results, output) → figures, or ValueError
    packages: tuple[str, ...] = ()
    memory_gib: float = 0
    limit_s: int = 540
    more: tuple[tuple[str, ...], ...] = ()
    recorded: Path | None = None

    def run(self, gpu: Gpu, say: Callable[[str], None]) -> dict[str, Any]:
        """Returns its record. ``reason``: why it did not run, or its output's end."""
        record: dict[str, Any] = {"name": self.name, "what": self.what, "state": "not run", "seconds": 0.0, "figures": {}}
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        reason = f"{' and '.join(missing)} not installed (docs/reference/gpu.md)" if missing else ""
        if not missing and self.memory_gib > gpu.memory_gib:
            reason = f"needs about {self.memory_gib:.0f} GiB, this GPU has {gpu.memory_gib:.0f}"
        if self.recorded is not None and not self.recorded.is_dir():
            reason = f"no rollouts in {self.recorded}; scripts/gpu_kit.sh --rollouts records them, without a GPU"
        if reason:
            say(f"{self.name}: not run, {reason}")
            return {**record, "reason": reason}
        say(f"{self.name}: {self.what} …")
        with tempfile.TemporaryDirectory() as folder:
            start = time.monotonic()
            printed = ""
            for command in (self.command, *self.more):
                left = max(1, self.limit_s - int(time.monotonic() - start))
                text, reason = _run([argument.replace("{out}", folder) for argument in command], left)
                printed += text
                if reason:
                    break
            record["seconds"] = time.monotonic() - start
            try:
                record["figures"] = {} if reason else self.figures(Path(folder), printed)
            except (ValueError, KeyError, OSError) as error:
                reason = f"its results cannot be read: {error!r}"
        record["state"] = "failed" if reason else "passed"
        say(f"{self.name}: {record['state']} after {record['seconds']:.0f} s")
        return {**record, "reason": f"{reason}\n{printed[-4000:]}".strip() if reason else ""}


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float
    capability: str
    cuda: str  # torch was built for this version

    @property
    def folder(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @classmethod
    def find(cls) -> Gpu | str:
        import torch

        if torch.version.cuda is None:
            return f"torch {torch.__version__} is a build without CUDA; install one with it (docs/reference/gpu.md)"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no GPU (nvidia-smi says more)"
        properties = torch.cuda.get_device_properties(0)
        capability = f"{properties.major}.{properties.minor}"
        return cls(properties.name, properties.total_memory / 2**30, capability, torch.version.cuda)


def _run(command: Sequence[str], limit_s: int) -> tuple[str, str]:
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # its children must end with it: a remaining one would keep the GPU's memory
    )
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return printed, f"not done after {limit_s} s"
        raise
    return printed, f"ended with status {process.returncode}" if process.returncode else ""


def check(
    parts: Sequence[Part], gpu: Gpu, output: Path, say: Callable[[str], None], *, resume: bool = False
) -> tuple[Report, bool]:
    """Writes after each part. False if a part failed. ``resume``: what passed with these versions is taken from reports."""
    started, outcomes = datetime.datetime.now(datetime.UTC), list[dict[str, Any]]()
    before = sorted((output / gpu.folder).glob("*T*Z.json")) if resume else []  # beside files that were written by hand
    reports = [report for path in before if (report := json.loads(path.read_text())).get("versions") == Report.versions()]
    ran = {part["name"]: part for report in reports for part in report["parts"] if part["state"] != "not run"}
    passed = {name: part for name, part in ran.items() if part["state"] == "passed"}
    for part in parts:
        outcomes.append(passed.get(part.name) or part.run(gpu, say))
        _report(outcomes, gpu, started).write(output)
    return _report(outcomes, gpu, started), all(outcome["state"] != "failed" for outcome in outcomes)


def _report(outcomes: Sequence[Mapping[str, Any]], gpu: Gpu, started: datetime.datetime) -> Report:
    rows = []
    for outcome in outcomes:
        figures = json.dumps(outcome["figures"], ensure_ascii=False)
        shown = outcome["reason"].splitlines()[0] if outcome["reason"] else figures
        seconds = "–" if outcome["state"] == "not run" else f"{outcome['seconds']:.0f}"
        rows.append((outcome["name"], outcome["state"], seconds, shown.replace("|", "/")))
    record = {"gpu": asdict(gpu), "parts": outcomes}
    note = f"{gpu.name}, {gpu.memory_gib:.0f} GiB, compute capability {gpu.capability}, CUDA {gpu.cuda}"
    table = Table(("part", "state", "seconds", "figures, or why not"), rows)
    return Report(f"{gpu.folder}/{started:%Y-%m-%dT%H%M%SZ}", record, [table], note)


def _pytest_figures(_: Path, printed: str) -> Mapping[str, Any]:
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|error|errors|skipped)\b", printed)}
    if not counts.get("passed"):
        raise ValueError(f"no test passed: {counts or 'pytest printed no counts'}")
    return counts


def _results(folder: Path, pattern: str) -> list[dict[str, Any]]:
    records = sorted(folder.glob(pattern))
    if not records:
        raise ValueError(f"it wrote no {pattern}")
    return list(json.loads(records[-1].read_text())["results"])


def _score_figures(folder: Path, _: str) -> Mapping[str, Any]:
    figures = {}
    for row in (ScoreMeasurement(**row) for row in _results(folder, "scores-cuda*.json")):
        of_a_copy = [round(gbps / row.copy_gbps, 2) for gbps in row.gbps]
        times = {"forward ms": row.forward_ms, "backward ms": row.backward_ms}
        figures[f"V {row.vocab}, {row.method}"] = {"of a copy": of_a_copy, **times, "peak extra": round(row.peak_extra, 3)}
    if not any("triton" in name.lower() for name in figures):
        raise ValueError("it measured no Triton kernels")
    return figures


def _step_figures(folder: Path, _: str) -> Mapping[str, Any]:
    results = [RecipeMeasurement(**row) for row in _results(folder, "recipes-*-cuda.json")]
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
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    expected = ("time/step", "time/sync", "canary/max_logprob_gap", "mismatch/kl", "memory/peak_gib")
    return {"steps": len(rows) - 1} | {name: rows[-1][name] for name in expected if name in rows[-1]}


def _replay_figures(folder: Path, _: str) -> Mapping[str, Any]:
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    names = ("entropy/noise/p99", "entropy/delta_masked", "entropy/delta_unmasked", "mismatch/kl", "mask/fraction", "time/step")
    return {"steps": len(rows) - 1} | {name: [row[name] for row in rows[1:] if name in row] for name in names}


_PYTEST = ("pytest", "-m", "gpu")  # the project's own -q is there already, and -qq prints no counts
_BENCH = ("tepo_megatron", "bench")
_TINY_ON_GPU = (
    *("tepo_megatron", "train", "examples/tiny/run.yaml", "output={out}/run", "engine.platform=cuda", "engine.parallel.tp=1"),
    *("engine.parallel.sequence_parallel=false", "model.dtype=bfloat16", "evaluate.every=0"),
)


_RECORDED = Path("gpu-kit/rollouts")
_REPLAY = (
    *(*_TINY_ON_GPU, "engine.layers=local", "optimizer.distributed=true", "engine.noise_every=1", "train.save_every=1"),
    *(f"rollout.replay={_RECORDED}", "rollout.replay_weights=any"),
)


def _tests(name: str, what: str, *files: str, packages: tuple[str, ...] = ("pytest", "hypothesis")) -> Part:
    return Part(name, what, (*_PYTEST, *(f"tests/gpu/{file}" for file in files)), _pytest_figures, packages)


def _steps(name: str, recipes: str, memory_gib: float, *settings: str) -> Part:
    size, packages = name.split()[1], () if settings else ("transformer_engine",)
    command = (*_BENCH, "recipes", "--size", size, "--recipes", recipes, "--steps", "20", "--output", "{out}", *settings)
    what = f"20 optimizer steps of a {size.upper()} Llama, {recipes.replace(',', ' beside ')}"
    return Part(name, what, command, _step_figures, packages, memory_gib)


def _three_steps(name: str, what: str, *settings: str) -> Part:
    return Part(
        name,
        what,
        (*_TINY_ON_GPU, "train.steps=3", "rollout.server.placement=colocated", *settings),
        _run_figures,
        ("vllm", "transformer_engine"),
    )


PARTS = (
    _tests("tests triton", "the kernels' values and gradients, pytest -m gpu", "test_triton_gpu.py"),
    _tests("tests transport", "weights by CUDA IPC and NCCL, pytest -m gpu", "test_transport_gpu.py"),
    _tests("tests layers", "fused head, FP8 layers, kept logits, pytest -m gpu", "test_layers_gpu.py"),
    Part(
        "kernels",
        "log-prob and entropy, bytes moved over the bandwidth of a copy",
        (*_BENCH, "scores", "--device", "cuda", "--output", "{out}"),
        _score_figures,
        ("triton",),
    ),
    Part(
        "head",
        "the fused head beside logits, memory and time",
        ("scripts.studies.measure_head", "--hidden", "4096", "--dtypes", "bfloat16", "--output", "{out}"),
        lambda folder, _: {"results": _results(folder, "head-*.json")},
    ),
    _steps("step 1b local", "none", 30, "engine.layers=local", "engine.head=fused", "optimizer.distributed=true"),
    Part(
        "replay",
        "the loop on recorded rollouts with Megatron's own layers, and a resume of it: checkpoints, noise, entropy's change",
        (*_REPLAY, "train.steps=2"),
        _replay_figures,
        more=((*_REPLAY, "train.steps=4", "--resume"),),
        recorded=_RECORDED,
    ),
    _tests(
        "tests experts",
        "experts in Transformer Engine's grouped products in bf16 and FP8, and split over two GPUs where there are two",
        "test_experts_gpu.py",
        packages=("pytest", "transformers", "transformer_engine"),
    ),
    _steps("step 1b", "none,tensorwise", 40),
    _steps("step 1b more", "none,delayed,blockwise", 40),
    _steps("step 8b", "none,blockwise", 160),
    _three_steps(
        "lean",
        "three steps of TEPO with optimizer states in fewer bits",
        *("optimizer.distributed=true", "optimizer.store_param_remainders=true"),
        *("optimizer.exp_avg_dtype=bfloat16", "optimizer.exp_avg_sq_dtype=bfloat16"),
    ),
    _three_steps(
        "lean host",
        "three steps of TEPO with optimizer states on the host",
        *("optimizer.distributed=true", "optimizer.offload_fraction=1.0"),
    ),
    _three_steps(
        "sync", "three steps of TEPO with a server on the same GPU: weights handed over, checked by digests and canary"
    ),
    _three_steps(
        "lora", "the same with LoRA: layers of Transformer Engine that compute with merged weights", "model.lora.rank=8"
    ),
)
"""In the order of value for a first run on a bare machine."""
