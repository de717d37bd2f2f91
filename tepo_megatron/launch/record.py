"""Records a job's git state, command and versions.

``python -m tepo_megatron.launch.record FILE [DISTRIBUTION...]`` fails if a distribution is not installed.
"""

import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_SLURM = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION", "SLURM_JOB_ACCOUNT")


def submission(command: list[str], source: Path = Path(__file__).parent) -> dict[str, Any]:
    return {"submitted": _now(), "command": command, "git": _git_state(source), "launcher": _environment()}


def _git_state(folder: Path) -> dict[str, Any]:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, errors="backslashreplace", check=True).stdout

    try:
        return {
            "commit": git("rev-parse", "HEAD").strip(),
            "status": git("status", "--porcelain", "--untracked-files=normal").splitlines(),
            "diff": git("diff", "HEAD"),
        }
    except (OSError, subprocess.CalledProcessError):
        return {}


def _environment() -> dict[str, Any]:
    packages = {}
    for item in metadata.distributions():
        with suppress(FileNotFoundError):  # raised for what has no name once importlib_metadata is imported
            if name := item.metadata["Name"]:  # an interrupted pip leaves folders without one
                packages[name] = item.version
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "python": f"{platform.python_version()}, {sys.executable}",
        "packages": dict(sorted(packages.items())),
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _main(path: str, *needed: str) -> None:
    here = _environment()
    slurm = {name.lower(): os.environ[name] for name in _SLURM if name in os.environ}
    Path(path).write_text(json.dumps({"started": _now(), **slurm, **here}, indent=2) + "\n")
    known = {name.lower().replace("_", "-") for name in here["packages"]}
    if missing := [name for name in needed if name not in known]:
        raise SystemExit(
            f"error: {', '.join(missing)} is not installed in {sys.executable} on {here['host']}; training on GPUs needs it: "
            "give cluster.container an image built from docker/trainer.Dockerfile, or cluster.python an environment that has it"
        )


if __name__ == "__main__":
    _main(*sys.argv[1:])
