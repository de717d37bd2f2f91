from __future__ import annotations

from pathlib import Path


def write_script(path: Path, text: str) -> str:
    """A program of bash, as a stand-in for another one of its name; returns the path as text."""
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return str(path)
