"""Starts a program of ``tests/support/worlds``, alone or on several ranks, and waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

TIMEOUT_S = 1100.0
"""After so long a process hangs: ten times what the longest takes, and just below what pytest gives a test."""


def run_program(name: str, *arguments: object, ranks: int | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run ``tests.support.worlds.NAME`` with these arguments, under torchrun's agent on so many ``ranks`` or, without, alone.

    Every process has one thread. ``environment`` is beside this process' own. Returns the standard output; a program that fails
    raises RuntimeError with the end of its standard error.
    """
    torchrun = () if ranks is None else ("-m", "tepo_megatron.runtime.torchrun", f"--nproc-per-node={ranks}")
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", f"tests.support.worlds.{name}", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with exit code {done.returncode}:\n{done.stderr[-8000:]}")
    return done.stdout
