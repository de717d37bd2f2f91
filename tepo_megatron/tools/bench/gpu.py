"""Runs every check that needs a GPU and writes one report, for ``scripts/gpu_check.sh``."""

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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tepo_megatron.tools.bench.gpu_checks import PARTS, Part
from tepo_megatron.tools.results import markdown, write_report
from tepo_megatron.versions import installed_version

NO_GPU = 3
"""Exit status without a GPU: nothing was checked."""

TAIL = 2000

PACKAGES = ("torch", "tepo-megatron", "megatron-core", "transformer-engine", "triton", "vllm", "apex")

Say = Callable[[str], None]


@dataclass(frozen=True)
class PartOutcome:
    """``reason``: why the part was not run, or the end of a failed part's output."""

    name: str
    what: str
    state: Literal["passed", "failed", "not run"]
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float
    capability: str
    cuda: str
    """The version that torch was built for."""


def select(only: str) -> list[Part]:
    """The parts of comma-separated names, all if empty. Raises ValueError for an unknown name."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [part.name for part in PARTS]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only {', '.join(unknown)}: no such part; known: {', '.join(known)}")
    return [part for part in PARTS if not names or part.name in names]


def find_gpu() -> Gpu | str:
    """The first GPU, or a sentence why there is none."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA; install one with it (docs/reference/gpu.md)"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU (nvidia-smi says more)"
    properties = torch.cuda.get_device_properties(0)
    capability = f"{properties.major}.{properties.minor}"
    return Gpu(properties.name, properties.total_memory / 2**30, capability, torch.version.cuda)


def _obstacle(part: Part, gpu: Gpu) -> str:
    missing = [name for name in part.packages if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (docs/reference/gpu.md)"
    if part.memory_gib > gpu.memory_gib:
        return f"needs about {part.memory_gib:.0f} GiB, this GPU has {gpu.memory_gib:.0f}"
    return ""


def run_part(part: Part, gpu: Gpu, *, say: Say) -> PartOutcome:
    """Any failure becomes the part's outcome."""
    if reason := _obstacle(part, gpu):
        say(f"{part.name}: not run, {reason}")
        return PartOutcome(part.name, part.what, "not run", reason=reason)
    say(f"{part.name}: {part.what} …")
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        printed, reason = _run([argument.replace("{out}", folder) for argument in part.command], part.limit_s)
        seconds = time.monotonic() - start
        figures: Mapping[str, Any] = {}
        if not reason:
            try:
                figures = part.figures(Path(folder), printed)
            except (ValueError, KeyError, OSError) as error:
                reason = f"its results cannot be read: {error!r}"
    state: Literal["passed", "failed"] = "failed" if reason else "passed"
    say(f"{part.name}: {state} after {seconds:.0f} s")
    return PartOutcome(part.name, part.what, state, seconds, figures, reason and f"{reason}\n{printed[-TAIL:]}".strip())


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
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        return printed, f"not done after {limit_s} s"
    return printed, f"ended with status {process.returncode}" if process.returncode else ""


COLUMNS = ("part", "state", "seconds", "figures, or why not")


def write_results(outcomes: Sequence[PartOutcome], gpu: Gpu, output: Path, started: datetime.datetime) -> tuple[Path, Path]:
    """Write ``<output>/<gpu>/<date and time>.{json,md}``."""
    folder = output / re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    record = {"gpu": asdict(gpu), "parts": [asdict(outcome) for outcome in outcomes]}
    table = markdown(COLUMNS, [cells(outcome) for outcome in outcomes])
    note = f"{gpu.name}, {gpu.memory_gib:.0f} GiB, compute capability {gpu.capability}, CUDA {gpu.cuda}"
    packages = [name for name in PACKAGES if installed_version(name)]
    return write_report(folder, started.strftime("%Y-%m-%dT%H%MZ"), record, table, note=note, packages=packages)


def cells(outcome: PartOutcome) -> tuple[str, ...]:
    shown = outcome.reason.splitlines()[0] if outcome.reason else json.dumps(outcome.figures, ensure_ascii=False)
    seconds = "–" if outcome.state == "not run" else f"{outcome.seconds:.0f}"
    return (outcome.name, outcome.state, seconds, shown.replace("|", "/"))
