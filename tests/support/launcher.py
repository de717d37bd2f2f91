import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.programs import TIMEOUT_S

ROOT = Path(__file__).parents[2]


def fail_or_skip(what: str, errors: str) -> None:
    """Skips the test if no package index can be reached."""
    with tempfile.TemporaryDirectory() as folder:
        pip = ["-m", "pip", "download", "--no-deps", "--no-cache-dir", "--retries=1", "--dest"]
        asked = subprocess.run([sys.executable, *pip, folder, "wheel"], capture_output=True, text=True, timeout=TIMEOUT_S)
    if "connection broken by" in asked.stderr:
        pytest.skip(f"{what}: no package index can be reached")
    pytest.fail(f"{what}: {errors[-4000:]}")


def launcher() -> Path:
    """Returns the programs of an environment with NeMo-Run and without torch."""
    done = subprocess.run(["bash", ROOT / "scripts/setup_launch.sh"], capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        fail_or_skip("setup_launch.sh", done.stderr)
    return ROOT / ".venv-launch" / "bin"
