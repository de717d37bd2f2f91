"""Runs that are killed by SIGKILL, resumed, and compared with one that was not."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support.programs import TIMEOUT_S

RUN = Path(__file__).parents[2] / "examples" / "tiny" / "run.yaml"
MEASURED_IN_SECONDS = ("time/", "lost/", "idle/", "tokens/s")

Moment = Callable[[], bool]
"""Whether the time has come; asked again and again."""


def start(*arguments: str, runner: Sequence[str] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, *runner, "-m", "tepo_megatron", "train", str(RUN), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def kill_at(process: subprocess.Popen[str], moment: Moment) -> str:
    """Kills the parent and its ranks when the moment comes; what was printed. Servers end by themselves."""
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while not moment():
            assert process.poll() is None, f"it ended before it was killed:\n{process.communicate()}"
            assert time.monotonic() < deadline, "the moment did not come"
            time.sleep(0.005)
    finally:
        victims = [psutil.Process(process.pid), *psutil.Process(process.pid).children()] if process.poll() is None else []
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
    return process.communicate(timeout=TIMEOUT_S)[0]


def kill_server() -> bool:
    """Kills an API server of this process' runs, as the kernel would; false where there is none, or none that answers yet."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "vllm.entrypoints.openai.api_server" in process.cmdline() and process.net_connections(kind="tcp"):
                process.kill()
                return True
    return False


def train(*arguments: str, runner: Sequence[str] = ()) -> str:
    """Trains to the end; what was printed."""
    process = start(*arguments, runner=runner)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, f"exit code {process.returncode}\n{out[-3000:]}\n{err[-3000:]}"
    return out


def train_killed_at(moments: Sequence[Moment], output: Path, *arguments: str) -> str:
    """Trains to the end, killed at each of the moments and started again: resumed, or anew where there is no checkpoint. All
    that was printed.
    """
    printed = ""
    for moment in moments:
        printed += kill_at(start(f"output={output}", *arguments, _again(output)), moment)
    return printed + train(f"output={output}", *arguments, _again(output))


def _again(output: Path) -> str:
    return "--resume" if list(output.glob("checkpoints/step_*[0-9]/state.json")) else "--overwrite"


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


def assert_same_run(folder: Path, expected: Path, *, checkpoint: int) -> None:
    """Metrics and samples, the rollouts of every step, optimizer states and weights: all to the last bit."""
    assert without_times(folder) == without_times(expected)
    same_bytes(folder, expected, "samples.jsonl")
    for name in ("rollouts", f"checkpoints/step_{checkpoint:06d}/shards", "model"):
        for path in sorted((expected / name).iterdir()):
            same_bytes(folder, expected, f"{name}/{path.name}")
        assert len(list((folder / name).iterdir())) == len(list((expected / name).iterdir()))


def same_bytes(folder: Path, expected: Path, name: str) -> None:
    assert (folder / name).exists() == (expected / name).exists(), f"{name} is in one of the two alone"
    if (expected / name).exists():
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), f"{name} differs"
