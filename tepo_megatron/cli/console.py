"""Writes tables for people to standard output: fitted to a terminal, at full width to a file or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    """Returns Rich's console on standard output."""
    from rich.console import Console

    # In a pipe there is no width to fit into: cells are better whole than cut.
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)


def show(renderable: Any) -> None:
    """Prints a table, or anything else that Rich renders."""
    console().print(renderable)


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """Prints rows of figures, the first column aligned to the left, the others to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    show(table)
