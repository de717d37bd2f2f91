"""The schema as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from tepo_megatron.config.schema import SchemaRow


def schema_table(rows: Sequence[SchemaRow]) -> Table:
    """One row for each field: its path, what it takes, its default, what it means."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_lines=False)
    table.add_column("field, and what it takes", overflow="fold")
    table.add_column("default", max_width=20, overflow="fold")
    table.add_column("meaning", min_width=28)
    for row in rows:
        condition = f"[dim]only with {escape(row.when)}:[/] " if row.when else ""
        table.add_row(
            f"[bold]{row.path}[/]\n[dim]  {escape(row.allowed)}[/]", escape(row.default), condition + escape(row.description)
        )
    return table
