"""``tepo faults``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from tepo_megatron.cli.console import as_records, print_json, show_table
from tepo_megatron.cli.errors import user_errors
from tepo_megatron.cli.options import AsJson


def faults(
    seed: Annotated[int, typer.Option("--seed", help="Of everything random: moments, bits, processes.")] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few of each class: under 4 minutes on two cores; whole: 25.")
    ] = False,
    only: Annotated[str, typer.Option("--only", help="Classes of faults, separated by commas; default: all.")] = "",
    output: Annotated[Path | None, typer.Option("--output", help="Folder. Default: out/faults-SEED[-quick].")] = None,
    as_json: AsJson = False,
) -> None:
    """Inject what a week on a cluster brings into tiny runs, and see what becomes of them: kills, hangs, damaged checkpoints,
    full disks, strangers, wrong configurations, hostile answers, and faults that nothing but a canary can see.

    Ends with status 1 if anything was lost. A call with the same seed and folder goes on where one was interrupted. Writes
    outcomes.jsonl and faults.md. Some faults need root: a small disk, another user.

    [dim]tepo faults --quick[/]

    [dim]tepo faults --seed 7 --only kills,hangs --output out/faults-7[/]
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended then, too
    with user_errors():
        from tepo_megatron.tools.faults import report
        from tepo_megatron.tools.faults.run import run, select

        folder = output or Path("out") / f"faults-{seed}{'-quick' * quick}"
        record = run(select(only), folder, seed=seed, quick=quick, say=lambda line: typer.echo(line, err=True))
        silent = report.silent_table(record)
        if as_json:
            faults, caught = as_records(report.COLUMNS, report.table(record)), as_records(report.SILENT_COLUMNS, silent)
            print_json({"faults": faults, "silent": caught, "lost": list(report.lost(record))})
        else:
            show_table(report.COLUMNS, report.table(record))
            if silent:
                show_table(report.SILENT_COLUMNS, silent)
            for line in report.lost(record):
                typer.echo(f"lost: {line}")
        words = ["tepo faults", f"--seed {seed}", *(["--quick"] if quick else []), *([f"--only {only}"] if only else [])]
        typer.echo(f"wrote {report.write_markdown(record, folder / 'faults.md', command=' '.join(words))}", err=as_json)
    raise typer.Exit(int(bool(report.lost(record))))
