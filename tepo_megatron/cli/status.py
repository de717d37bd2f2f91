"""``tepo status``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from tepo_megatron.cli.errors import user_errors
from tepo_megatron.cli.options import AsJson

WATCH_S = 2.0


def status(
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Output folder of a run.")],
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every two seconds until the run ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """What a run does now, who waits for whom, and what went wrong; or how it ended.

    Reads the output folder alone, on any machine that sees it.

    [dim]tepo status out/tiny --watch[/]
    """
    from tepo_megatron.run.output.status import run_status, status_record

    clears = watch and sys.stdout.isatty() and not as_json
    shown: list[str] = []
    with user_errors():
        while True:
            lines, goes_on = run_status(output)
            if as_json:
                lines = [json.dumps(status_record(output), ensure_ascii=False)]
            if clears:
                typer.echo("\x1b[2J\x1b[H", nl=False)
            if clears or lines != shown:
                typer.echo("\n".join(lines))
            shown = lines
            if not watch or not goes_on:
                return
            time.sleep(WATCH_S)
