"""Starts programs of ``tests/support/worlds`` and whole runs of ``tepo train``, and reads what these leave."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMEOUT_S = 1100.0
"""After so long a process hangs: ten times what the longest takes, and just below what pytest gives a test."""

FEW_BLOCKS = "--num-gpu-blocks-override=256"
"""In ``rollout.server.extra_args``. A vLLM worker would write zeros to a GiB when it starts."""


def run_python(
    *arguments: object,
    cwd: Path | None = None,
    timeout_s: float = TIMEOUT_S,
    code: int = 0,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """``python …``, which must end with this exit code. ``environment`` is added to this process' own."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-8000:]}"
    return done


def run_program(name: str, *arguments: object, ranks: int | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run ``tests.support.worlds.NAME`` with these arguments, under torchrun's agent on so many ``ranks`` or, without, alone.

    Every process has one thread. Returns the standard output.
    """
    torchrun = () if ranks is None else ("-m", "tepo_megatron.runtime.torchrun", f"--nproc-per-node={ranks}")
    environment = {"OMP_NUM_THREADS": "1", **(environment or {})}
    return run_python(*torchrun, "-m", f"tests.support.worlds.{name}", *arguments, environment=environment).stdout


RUN = Path(__file__).parents[2] / "examples" / "tiny" / "run.yaml"
MEASURED_IN_SECONDS = ("time/", "lost/", "idle/", "tokens/s")


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tepo_megatron", "train", str(RUN), *arguments]
    return subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True)


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
