from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from tepo_megatron.runtime.rank import speaks_first
from tepo_megatron.runtime.text import echo

if TYPE_CHECKING:
    from rich.table import Table

    from tepo_megatron.config import RunConfig


def show(renderable: Any, **options: Any) -> None:
    """``options`` are those of rich's ``Console.print``."""
    from tepo_megatron.runtime.terminal import Terminal

    Terminal.of_output().print(renderable, **options)


def print_json(value: Any) -> None:
    """Other output of a command goes to standard error."""
    echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def as_records(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    return [dict(zip(columns, row, strict=True)) for row in rows]


def new_table(*columns: str, keep: str = "", title: str | None = None) -> Table:
    """``keep``: this column's cells stay on one line."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == keep)
    return table


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, as_json: bool = False) -> None:
    if as_json:
        print_json(as_records(columns, rows))
        return
    from rich.markup import escape

    table = new_table(*map(escape, columns))
    for number, column in enumerate(table.columns):
        is_text = number == 0 or any(row[number][:1].isalpha() for row in rows)
        column.justify = "left" if is_text else "right"
    for row in rows:
        table.add_row(*map(escape, row))
    show(table)


def _complete_setting(incomplete: str) -> list[str]:
    """``optimizer.l`` → ``optimizer.lr=``; after ``=`` the possible values."""
    from tepo_megatron.config.schema import schema_rows

    name, equals, _ = incomplete.partition("=")
    rows = {row.path: row.allowed for row in schema_rows()}
    if not equals:
        return [f"{path}=" for path in rows if path.startswith(name)]
    choices = [choice.strip('"') for choice in rows.get(name, "").replace(" or ", ", ").split(", ")]
    return [f"{name}={choice}" for choice in choices if " " not in choice and f"{name}={choice}".startswith(incomplete)]


_SETTINGS_HELP = "Dotted overrides, such as train.steps=10."
Overrides = Annotated[list[str] | None, Argument(metavar="a.b=c", help=_SETTINGS_HELP, autocompletion=_complete_setting)]
RunFile = Annotated[Path, Argument(metavar="RUN.yaml", help="The run's configuration.")]
RunOrSetting = Annotated[str | None, Argument(metavar="[RUN.yaml]", help="The run's configuration; settings alone will do.")]
AsJson = Annotated[bool, Option("--json", help="For tools.")]


def split_run(run: str | None, overrides: Sequence[str] | None) -> tuple[Path | None, list[str]]:
    """A first word such as ``model.path=…`` is an override. Raises ValueError without either."""
    settings = list(overrides or ())
    if run is not None and "=" in run and not os.path.exists(run):
        return None, [run, *settings]
    if run is None and not settings:
        raise ValueError(
            "neither a run's file nor settings; give RUN.yaml ('tepo init' writes one), or settings such as model.path=FOLDER "
            "data.train=FILE reward.verifier=NAME"
        )
    return None if run is None else Path(run), settings


def load_config(run: Path | None, overrides: Sequence[str], *, trains: bool = True) -> RunConfig:
    """``load_run`` with warnings as sentences, by one process only."""
    from tepo_megatron.config.load import collected_warnings, load_run

    with collected_warnings() as sentences:
        config = load_run(run, overrides, trains=trains)
    for text in sentences:
        warnings.filterwarnings("ignore", message=re.escape(text))  # printed here; do not repeat it when a section is replaced
        if speaks_first():
            echo(f"warning: {text}", err=True)
    return config
