"""Output of commands: tables, JSON, and errors as sentences for the user."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from tepo_megatron.errors import is_ours, wants_traceback
from tepo_megatron.runtime.preemption import INTERRUPTED
from tepo_megatron.runtime.rank import print_error

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    from rich.console import Console

    # A pipe has no width: do not cut cells.
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)


def show(renderable: Any) -> None:
    console().print(renderable)


def print_json(value: Any) -> None:
    """Print JSON alone; other output of a command goes to standard error."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")
    sys.stdout.flush()


def as_records(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    return [dict(zip(columns, row, strict=True)) for row in rows]


def show_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None, as_json: bool = False
) -> None:
    """Print rows: first column left-aligned, others right-aligned; as JSON, a list of objects."""
    if as_json:
        print_json(as_records(columns, rows))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    show(table)


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn user errors into a sentence on standard error and exit code 1, and Ctrl-C into 130."""
    try:
        yield
    except typer.Exit:  # it is a subclass of RuntimeError
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (ValueError, RuntimeError) as error:
        if wants_traceback() or not is_ours(error):
            raise
        print_error(str(error))
        raise typer.Exit(1) from error
