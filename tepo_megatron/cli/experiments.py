"""``tepo sweep`` and ``tepo faults``: many runs from one command."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from tepo_megatron.cli.console import as_records, print_json, show_table, user_errors
from tepo_megatron.cli.options import AsJson


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="A run's file, axes of settings, and seeds.")],
    output: Annotated[Path | None, typer.Option("--output", help="Folder of all runs, in place of the file's.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs at a time here, each on its share of the cores.")] = 1,
    part: Annotated[
        str | None, typer.Option("--part", metavar="K/N", help="Only the runs of the K-th of N jobs, for a Slurm array.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list the runs, and start none.")] = False,
    table_only: Annotated[bool, typer.Option("--table", help="Only make the tables of what is done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a grid of settings and seeds, and make one table of what came of it.

    Runs that are done are left alone, and those that were begun go on: the same command resumes a sweep. Ctrl-C lets each run
    save what it trained. A run that fails is said, and the others go on; the command then ends with status 1. Writes sweep.md,
    sweep.csv and sweep.json into the output folder, and what each run said into its logs.

    [dim]tepo sweep examples/evidence/tiny.yaml --dry-run[/]

    [dim]tepo sweep examples/tiny/seeds.yaml --jobs 2[/]

    [dim]srun tepo sweep SWEEP.yaml --part $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT   # in a job of sbatch --array=1-8[/]
    """
    with user_errors():
        from tepo_megatron.tools.sweep.file import read_sweep, runs_of, shard
        from tepo_megatron.tools.sweep.runner import Sweep, check_runs, is_done
        from tepo_megatron.tools.sweep.table import find, table, write_tables

        given = read_sweep(file)
        runs = runs_of(given, output)
        mine = shard(runs, part)
        if dry_run:
            check_runs(given, mine)
            shared = () if as_json else given.overrides
            rows = [[run.name, "done" if is_done(run) else "to do", " ".join(run.overrides[len(shared) :])] for run in mine]
            show_table(["run", "state", "settings"], rows, as_json=as_json)
            typer.echo(f"{len(mine)} runs of {given.run}; shared: {' '.join(shared) or '–'}", err=True)
            return
        ended = [] if table_only else Sweep(given, mine, say=lambda line: typer.echo(line, err=True), jobs=jobs).run()
        result = find(given, runs)
        if as_json:
            failed = [{"run": one.run.name, "said": one.said} for one in ended if one.outcome == "failed"]
            print_json({"found": as_records(*table(given, result)), "failed": failed})
        else:
            show_table(*table(given, result))
        for path in write_tables(given, result, output or given.output):
            typer.echo(f"wrote {path}", err=as_json)
        for one in ended:
            if one.outcome == "failed":
                typer.echo(f"failed: {one.run.name}: {one.said}", err=True)
    if any(one.outcome == "stopped" for one in ended):
        raise typer.Exit(130)
    raise typer.Exit(int(any(one.outcome == "failed" for one in ended)))


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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM also ends all started processes
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
