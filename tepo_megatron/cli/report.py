"""``tepo report``."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tepo_megatron.cli.console import print_json
from tepo_megatron.cli.errors import user_errors
from tepo_megatron.cli.options import AsJson

if TYPE_CHECKING:
    from tepo_megatron.tools.report.page import Written


def report(
    outputs: Annotated[
        list[Path],
        typer.Argument(metavar="OUT", help="Output folders of runs, or of a sweep."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page. Default: OUT/report.html; of several OUT report.html here."),
    ] = None,
    title: Annotated[str, typer.Option("--title", help="Above the page; default: the runs' names.")] = "",
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metrics", metavar="NAME", help="Only these, such as 'entropy/*'; may be given more than once."),
    ] = None,
    samples: Annotated[
        int,
        typer.Option("--samples", min=0, help="At most so many responses of each kind (held out, training, tokens)."),
    ] = 3000,
    size: Annotated[float, typer.Option("--size", min=0.5, help="Megabytes that the page may take, about.")] = 5.0,
    watch: Annotated[
        int | None,
        typer.Option(
            "--watch", min=2, metavar="SECONDS", help="Write it again and again until the runs end; an open page follows."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file to look at runs in a browser: nothing to install, nothing loaded from a network.

    Runs side by side: curves, where the time went, settings that differ, faults and restarts; and samples, token by token
    where a run records them (log.token_samples=8). Runs with the same settings but for their seed are drawn together, as mean
    and range, and one kind stands beside another seed by seed, with intervals. It may be made while the runs go on, and
    on any machine that sees their folders.

    [dim]tepo report out/tiny[/]

    [dim]tepo report out/tiny --watch 30                      # while it trains; open out/tiny/report.html[/]

    [dim]tepo report out/tepo out/grpo -o compare.html[/]

    [dim]tepo report out/evidence-tiny --metrics 'accuracy/*' --metrics reward/mean --samples 300   # a sweep[/]
    """
    from tepo_megatron.tools.report.page import Options, write_report
    from tepo_megatron.tools.report.runs import runs_in

    single = len(outputs) == 1 and outputs[0].name != "metrics.jsonl"
    target = output or (outputs[0] if single else Path()) / "report.html"
    options = Options(title, tuple(metrics or ()), samples, size, refresh=watch or 0)
    said = ""
    going: bool | None = None
    with user_errors():
        while watch and (missing := [path for path in outputs if not runs_in(path)]):
            if said != (said := f"waits for a run in {', '.join(map(str, missing))}"):
                typer.echo(said, err=True)
            time.sleep(watch)
        while True:
            written = write_report(outputs, target, options)
            if going != (going := written.goes_on) and not as_json:
                typer.echo(_told(written))
            if watch is None or not written.goes_on:
                break
            time.sleep(watch)
    if as_json:
        print_json({**asdict(written), "path": str(written.path)})


def _told(written: Written) -> str:
    runs = "1 run" if written.runs == 1 else f"{written.runs} runs"
    going = ", which goes on" if written.goes_on else ""
    return f"wrote {written.path}: {runs}{going}, {written.samples} samples, {written.bytes / 1e6:.1f} MB"
