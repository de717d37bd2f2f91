"""``tepo data prepare`` and ``tepo data benchmarks``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tepo_megatron.cli.errors import user_errors
from tepo_megatron.cli.options import AsJson


def prepare_command(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Such as math500: tepo data benchmarks lists them.")],
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Where problems and digests are kept.")] = Path(
        "data/benchmarks"
    ),
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="PATH", help="The published file, or a folder with it, where there is no network."),
    ] = None,
    family: Annotated[
        str | None, typer.Option("--family", help="Prompts for which models: plain, base, instruct, qwen or reasoning.")
    ] = None,
    accept_changed: Annotated[
        bool, typer.Option("--accept-changed", help="Take a file of another digest from now on.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make problems of published benchmarks: files that are pinned and checked, and a run's section to evaluate on them.

    [dim]tepo data prepare math500 aime24 aime25 --family qwen[/]

    [dim]tepo eval models/mine --run data/benchmarks/benchmarks.yaml[/]

    [dim]tepo data prepare gsm8k --from /shared/downloads/gsm8k[/]
    """
    with user_errors():
        from tepo_megatron.tasks.data.benchmarks.prepare import SETS, prepare

        done = []
        for name in names:
            done.append(prepare(name, to, source=source, family=family, accept_changed=accept_changed))
            if not as_json:
                one = done[-1]
                typer.echo(f"{one.path}: {one.problems} problems of {one.source}")
                if one.recorded:
                    typer.echo(f"  its SHA-256 was not known and is recorded from now on: {one.source_sha256}")
    if as_json:
        rows = [{**asdict(one), "path": str(one.path), "source": str(one.source)} for one in done]
        typer.echo(json.dumps(rows, indent=2))
    else:
        typer.echo(f"to evaluate on them: tepo eval MODEL_DIR --run {to / SETS}")


def benchmarks_command(as_json: AsJson = False) -> None:
    """List the benchmarks that can be prepared, with where their files are."""
    from tepo_megatron.tasks.data.benchmarks.registry import BENCHMARKS

    if as_json:
        shown = ("title", "repository", "revision", "file", "sha256", "problems")
        rows = {name: {field: getattr(each, field) for field in shown} for name, each in BENCHMARKS.items()}
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "benchmark", "problems", "from", "digest")
    for name, each in BENCHMARKS.items():
        known = "known" if each.sha256 else "recorded at first"
        table.add_row(name, each.title, str(each.problems), f"{each.repository} {each.file}", known)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
