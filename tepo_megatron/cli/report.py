"""``tepo report``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from tepo_megatron.cli.console import print_json
from tepo_megatron.cli.errors import user_errors
from tepo_megatron.cli.options import AsJson


def report(
    outputs: Annotated[
        list[Path], typer.Argument(metavar="OUT", help="Output folders of runs, or of a sweep; their metrics.jsonl alone will do.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page; default: OUT/report.html, of several runs report.html here.")
    ] = None,
    title: Annotated[str, typer.Option("--title", help="Above the page; default: the runs' names.")] = "",
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metrics", metavar="NAME", help="Only these metrics; patterns such as 'entropy/*', more than once. Default: all."),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=0, help="At most so many responses of each kind: held out, trained on, token by token.")
    ] = 3000,
    size: Annotated[float, typer.Option("--size", min=0.5, help="Megabytes that the page may take, about.")] = 5.0,
    watch: Annotated[
        int | None,
        typer.Option("--watch", min=2, metavar="SECONDS", help="Write it anew until the runs end; the open page loads itself again."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file to look at runs in a browser: nothing to install, nothing loaded from a network.

    Runs side by side: curves, where the time went, settings that differ, faults and restarts; and samples, token by token
    where a run records them (log.token_samples=8). Runs with the same settings but for their seed are drawn together, as mean and
    range. It may be made while the runs go on, and on any machine that sees their folders.

    [dim]tepo report out/tiny[/]

    [dim]tepo report out/tiny --watch 30                      # while it trains; open out/tiny/report.html[/]

    [dim]tepo report out/tepo out/grpo -o compare.html[/]

    [dim]tepo report out/evidence-tiny --metrics 'accuracy/*' --metrics reward/mean --samples 300   # a sweep[/]
    """
    from tepo_megatron.report.page import Options, Written, write_report

    single = len(outputs) == 1 and outputs[0].is_dir()
    target = output or (outputs[0] if single else Path()) / "report.html"
    options = Options(title, tuple(metrics or ()), samples, size, refresh=watch or 0)
    said: Written | None = None
    with user_errors():
        while True:
            written = write_report(outputs, target, options)
            if said is None and not as_json:
                typer.echo(
                    f"wrote {written.path}: {written.runs} {'run' if written.runs == 1 else 'runs'}, {written.samples} samples,"
                    f" {written.bytes / 1e6:.1f} MB"
                )
            said = written
            if watch is None or not written.goes_on:
                break
            time.sleep(watch)
    if as_json:
        print_json({"path": str(said.path), "bytes": said.bytes, "runs": said.runs, "samples": said.samples, "goes_on": said.goes_on})
