"""Finds checkpoints on disk. Imports no Megatron, so that a run can be checked before it starts."""

from __future__ import annotations

from pathlib import Path


def checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def checkpoint_folder(parent: Path, step: int) -> Path:
    return parent / checkpoint_name(step)


def finished(parent: Path) -> list[Path]:
    """Returns the finished checkpoints in a folder, oldest first."""
    found = (path for path in parent.glob("step_*") if path.suffix != ".partial" and (path / "state.json").exists())
    return sorted(found)


def newest(parent: Path) -> Path:
    """Returns the newest finished checkpoint in a folder. Raises ValueError if there is none."""
    found = finished(parent)
    if not found:
        raise ValueError(f"train.resume = true, but {parent} has no finished checkpoint; start without it")
    return found[-1]
