"""How a measurement is shown and kept: a table on the terminal, JSON with all numbers, Markdown with the table."""

from __future__ import annotations

import datetime
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tepo_megatron.bench.machine import describe_machine


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """For a terminal: the first column to the left, the others to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120).print(table)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
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
    """``<stem>.json`` with ``record`` and ``<stem>.md`` with the Markdown ``table``, both with date, machine and versions."""
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
