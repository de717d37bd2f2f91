"""Starts a program of ``tests/support/worlds``, alone or on several ranks, and waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TIMEOUT_S = 1100.0
"""After so long a process hangs: ten times what the longest takes, and just below what pytest gives a test."""


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
