"""Whole runs of ``tepo train``, and what they leave."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.programs import TIMEOUT_S, run_python

RUN = Path(__file__).parents[2] / "examples" / "tiny" / "run.yaml"
MEASURED_IN_SECONDS = ("time/", "lost/", "idle/", "tokens/s")


def start(*arguments: str, runner: Sequence[str] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, *runner, "-m", "tepo_megatron", "train", str(RUN), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def train(*arguments: str, runner: Sequence[str] = ()) -> str:
    """Trains to the end; what was printed."""
    return run_python(*runner, "-m", "tepo_megatron", "train", RUN, *arguments).stdout


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def last_step(folder: Path) -> int:
    """Of the rows on disk; -1 without any, and while a last one is being written."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines and lines[-1].endswith("}\n") else -1


def wait_for_rows(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while last_step(folder) < count - 1:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no step in time"
        time.sleep(0.05)


def without_times(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith(MEASURED_IN_SECONDS)} for row in rows(folder)]


def same_bytes(folder: Path, expected: Path, name: str) -> None:
    assert (folder / name).exists() == (expected / name).exists(), f"{name} is in one of the two alone"
    if (expected / name).exists():
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), f"{name} differs"
