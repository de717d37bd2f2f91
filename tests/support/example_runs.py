"""Runs of the examples, as their READMEs start them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

from tests.support.kills import rows
from tests.support.programs import TIMEOUT_S

ROOT = Path(__file__).parents[2]
SMALL_RUN = (
    "train.steps=2",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "train.minibatches=2",
    "evaluate.every=2",
)
"""Over in seconds: two small steps, with an evaluation before and after."""


def run(
    *arguments: str,
    cwd: Path = ROOT,
    timeout_s: float = TIMEOUT_S,
    code: int = 0,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """``python …``, which must end with this exit code. ``environment`` is added to this process' own."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == code, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def tepo(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return run("-m", "tepo_megatron", *arguments, **options)


def script(path: Path) -> ModuleType:
    """A file of an example as a module."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def greedy_accuracies(out: Path) -> list[float]:
    result = [row["accuracy/greedy"] for row in rows(out) if row.get("accuracy/greedy") is not None]
    print("held out, greedy:", result)
    return result


def check_learning(task: str, config: str, out: Path, begins_below: float, ends_above: float, *warm_start: str) -> None:
    """The mean reward of the samples in the first and the last five steps, and of greedy held-out games at the end; minutes."""
    start = out.with_name("start")
    run("examples/environments/make_warm_start.py", task, str(start), *warm_start, timeout_s=3600)
    tepo("train", config, f"model.path={start}", f"output={out}", timeout_s=7200)
    first, last = (fmean(row["reward/mean"] for row in some) for some in (rows(out)[1:6], rows(out)[-5:]))
    greedy = [row["heldout/reward_greedy"] for row in rows(out) if "heldout/reward_greedy" in row]
    print(f"reward {first:.3f} -> {last:.3f}; held out, greedy: {', '.join(f'{value:.3f}' for value in greedy)}")
    assert first < begins_below
    assert last > ends_above
    assert greedy[-1] > ends_above
