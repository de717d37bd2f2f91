"""``tepo compare``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tepo_megatron.cli.errors import user_errors
from tepo_megatron.cli.options import AsJson

if TYPE_CHECKING:
    from rich.table import Table

    from tepo_megatron.tasks.evaluate.estimators import Interval
    from tepo_megatron.tasks.evaluate.results import SetComparison


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="Output folder of tepo eval.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Output folder of tepo eval for another model.")],
    as_json: AsJson = False,
) -> None:
    """Compare two evaluated models, problem by problem: how much better B is than A, with 95 % intervals.

    An interval of the difference that excludes 0 is marked with a star.

    [dim]tepo eval base evaluate.sets.aime.path=aime.jsonl output=out/base[/]

    [dim]tepo eval out/mine/model evaluate.sets.aime.path=aime.jsonl output=out/mine[/]

    [dim]tepo compare out/base out/mine[/]
    """
    with user_errors():
        from tepo_megatron.tasks.evaluate.results import compare_results

        found = compare_results(first, second)
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found], indent=2))
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_table(first, second, found))
    for each in found:
        for line in _remarks(each):
            console.print(f"  {each.name}: {line}", highlight=False, markup=False)


def _table(first: Path, second: Path, found: Sequence[SetComparison]) -> Table:
    from rich.table import Table

    table = Table("set", "", f"A: {first}", f"B: {second}", "B − A", title="Means and 95 % intervals", title_justify="left")
    for each in found:
        for at, (name, figure) in enumerate(each.figures.items()):
            star = " *" if figure.difference.excludes_zero else ""
            row = [_shown(figure.first), _shown(figure.second), _shown(figure.difference, "+") + star]
            table.add_row(each.name if at == 0 else "", name, *row)
        table.add_section()
    return table


def _remarks(each: SetComparison) -> list[str]:
    lines = [f"{each.problems} problems"]
    if each.left_out:
        lines[0] += f"; {each.left_out} left out, which only one of the two has, or which differ"
    lines += [f"{key} differs: {one} in A, {other} in B" for key, (one, other) in each.settings.items()]
    return lines


def _shown(value: Interval, sign: str = "") -> str:
    digits = ".3f" if max(abs(value.mean), abs(value.high)) < 10 else ".1f"
    return f"{value.mean:{sign}{digits}} [{value.low:{sign}{digits}}, {value.high:{sign}{digits}}]"
