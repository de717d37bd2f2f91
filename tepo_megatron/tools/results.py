"""Writes measurements: JSON with all numbers, Markdown with the table."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def write_report(
    folder: Path,
    stem: str,
    record: Mapping[str, Any],
    table: str,
    *,
    note: str,
    packages: Sequence[str] = ("torch", "tepo-megatron"),
) -> tuple[Path, Path]:
    """Writes ``<stem>.json`` with ``record`` and ``<stem>.md`` with ``table``, both with date, machine and versions."""
    folder.mkdir(parents=True, exist_ok=True)
    head: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": {name: version(name) for name in packages} | {"python": platform.python_version()},
    }
    paths = folder / f"{stem}.json", folder / f"{stem}.md"
    paths[0].write_text(json.dumps({**head, **record}, indent=1) + "\n")
    paths[1].write_text(" · ".join([head["date"], head["machine"], str(head["versions"]), note]) + "\n\n" + table)
    return paths


def describe_machine() -> str:
    """Returns cores, processor and load as text."""
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return f"{os.cpu_count()} × {cpu}, load average {os.getloadavg()[0]:.1f}"
