import subprocess
from pathlib import Path


def write_script(path: Path, text: str) -> str:
    """A program of bash, as a stand-in for another one of its name; returns the path as text."""
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


def bash(script: str, *arguments: str, folder: str = "/bin", **environment: str) -> subprocess.CompletedProcess[str]:
    """``folder`` has programs in place of the real ones."""
    path = f"{folder}:/usr/bin:/bin"
    command = ["bash", "-c", script, "script.sh", *arguments]
    return subprocess.run(command, env={"PATH": path, **environment}, capture_output=True, text=True, check=False)
