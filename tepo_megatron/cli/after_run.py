"""``tepo status``, ``plot``, ``compare`` and ``report``: commands that read output folders."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tepo_megatron.cli.console import print_json, user_errors
from tepo_megatron.cli.options import AsJson

if TYPE_CHECKING:
    from rich.table import Table

    from tepo_megatron.tasks.evaluate.estimators import Interval
    from tepo_megatron.tasks.evaluate.results import SetComparison
if TYPE_CHECKING:
    from tepo_megatron.tools.report.page import Written


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

        result = compare_results(first, second)
    if as_json:
        typer.echo(json.dumps([asdict(item) for item in result], indent=2))
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_table(first, second, result))
    for item in result:
        for line in _remarks(item):
            console.print(f"  {item.name}: {line}", highlight=False, markup=False)


def _table(first: Path, second: Path, result: Sequence[SetComparison]) -> Table:
    from rich.table import Table

    table = Table("set", "", f"A: {first}", f"B: {second}", "B − A", title="Means and 95 % intervals", title_justify="left")
    for item in result:
        for index, (name, figure) in enumerate(item.figures.items()):
            star = " *" if figure.difference.excludes_zero else ""
            row = [_shown(figure.first), _shown(figure.second), _shown(figure.difference, "+") + star]
            table.add_row(item.name if index == 0 else "", name, *row)
        table.add_section()
    return table


def _remarks(item: SetComparison) -> list[str]:
    lines = [f"{item.problems} problems"]
    if item.left_out:
        lines[0] += f"; {item.left_out} left out, which only one of the two has, or which differ"
    lines += [f"{key} differs: {one} in A, {other} in B" for key, (one, other) in item.settings.items()]
    return lines


def _shown(value: Interval, sign: str = "") -> str:
    digits = ".3f" if max(abs(value.mean), abs(value.high)) < 10 else ".1f"
    return f"{value.mean:{sign}{digits}} [{value.low:{sign}{digits}}, {value.high:{sign}{digits}}]"


def plot(
    outputs: Annotated[list[Path], typer.Argument(metavar="OUT", help="Output folders of runs, or their metrics.jsonl.")],
    png: Annotated[Path | None, typer.Option("--png", help="Where to; default: OUT/curves.png or comparison.png.")] = None,
    title: Annotated[str | None, typer.Option("--title", help="Above the picture; default: the folders' names.")] = None,
) -> None:
    """Draw the curves of a run, or of several in one picture to compare them.

    [dim]tepo plot out/tiny[/]

    [dim]tepo plot out/tepo out/grpo --png tepo-grpo.png[/]
    """
    from tepo_megatron.run.display.plots import plot_comparison, plot_curves

    files = [path / "metrics.jsonl" if path.is_dir() else path for path in outputs]
    with user_errors():
        for path, file in zip(outputs, files, strict=True):
            if not file.is_file():
                raise ValueError(f"{path} has no metrics.jsonl; give the output folder of a run")
        names = _distinct_names(files)
        if len(files) == 1:
            target = png or files[0].with_name("curves.png")
            plot_curves(files[0], target, title or names[0])
        else:
            target = png or Path("comparison.png")
            plot_comparison(dict(zip(names, files, strict=True)), target, title or " · ".join(names))
    typer.echo(f"wrote {target}")


def _distinct_names(files: list[Path]) -> list[str]:
    folders = [file.resolve().parent for file in files]
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(file.parent) for file in files]


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
