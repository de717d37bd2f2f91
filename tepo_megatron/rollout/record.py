"""A step's rollouts as JSON lines: written whole or not at all, read back exactly.

The first line says what follows, ``{"format": 1, "step": 12, "rollouts": 512}``; then comes one rollout per line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tepo_megatron.types import Rollout

FORMAT = 1

_ROLLOUT = TypeAdapter(Rollout)


def record_path(folder: Path, step: int) -> Path:
    """Where the rollouts of a step lie, such as ``<folder>/step_0000012.jsonl``."""
    return folder / f"step_{step:07d}.jsonl"


def write_rollouts(folder: Path, step: int, rollouts: Sequence[Rollout]) -> Path:
    """Write the rollouts of a step, in their order, and return the file; it appears under its name only when it is whole.

    Floats are written so that they are read back to the last bit. Raises OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = record_path(folder, step)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"format": FORMAT, "step": step, "rollouts": len(rollouts)}) + "\n")
        file.writelines(json.dumps(asdict(rollout)) + "\n" for rollout in rollouts)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return path


def read_rollouts(folder: Path, step: int) -> list[Rollout]:
    """What :func:`write_rollouts` wrote. Raises ValueError with file and line if it is missing, cut or damaged."""
    path = record_path(folder, step)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the recorded rollouts of step {step} cannot be read: {error}") from error
    if lines.pop():  # every line ends with a line feed, so the last piece is empty
        raise ValueError(f"{path}, line {len(lines) + 1}: the file ends within a line; record the step again")
    header = _header(path, lines, step)
    if len(lines) - 1 != header["rollouts"]:
        raise ValueError(
            f"{path}, line {len(lines)}: the file ends after {len(lines) - 1} rollouts, but its first line announces "
            f"{header['rollouts']}; record the step again"
        )
    return [_rollout(path, number, line) for number, line in enumerate(lines[1:], start=2)]


def _header(path: Path, lines: Sequence[str], step: int) -> dict[str, Any]:
    try:
        header = json.loads(lines[0]) if lines else None
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("step") != step:
        raise ValueError(f"{path}, line 1: not the head of a record of step {step} in format {FORMAT}")
    return header


def _rollout(path: Path, number: int, line: str) -> Rollout:
    try:
        return _ROLLOUT.validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the line"
        raise ValueError(f"{path}, line {number}: not a rollout: {where}: {first['msg']}") from error
