from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.programs import TIMEOUT_S

ROOT = Path(__file__).parents[2]


def set_up(script: str) -> None:
    command = ["bash", str(ROOT / "scripts" / script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        pytest.skip(f"{script}: {done.stderr.strip().splitlines()[-1]}")


def launcher() -> Path:
    """Returns the programs of an environment with NeMo-Run and without torch."""
    set_up("setup_launch.sh")
    return ROOT / ".venv-launch" / "bin"
