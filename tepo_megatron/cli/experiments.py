from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from tepo_megatron.cli.console import AsJson, as_records, print_json, show_table
from tepo_megatron.runtime.preemption import StopRequested
from tepo_megatron.runtime.text import echo, outlive_readers

app = typer.Typer()


@app.command("sweep")
def _sweep(
    file: Annotated[Path, Argument(metavar="SWEEP.yaml", help="A run's file, axes of settings, and seeds.")],
    output: Annotated[Path | None, Option(help="Folder of all runs, in place of the file's.")] = None,
    jobs: Annotated[int, Option(min=1, help="Runs at a time here, each on its share of the cores and GPUs.")] = 1,
    part: Annotated[str | None, Option(metavar="K/N", help="Only the runs of the K-th of N jobs, for a Slurm array.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Check and list the runs, and start none.")] = False,
    table_only: Annotated[bool, Option("--table", help="Only make the tables of what is done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a grid of settings and seeds, and make one table of the results.

    The same command resumes a sweep: finished runs stay, others continue. Ctrl-C lets each run save its training. If a run
    fails, the others continue, and the exit code is 1. Writes sweep.md, sweep.csv and sweep.json into the output folder, and
    each run's output into its logs.

    [dim]tepo sweep examples/tiny/seeds.yaml --jobs 2[/]

    [dim]srun tepo sweep SWEEP.yaml --part $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT   # in a job of sbatch --array=1-8[/]
    """
    outlive_readers()
    from tepo_megatron.config.load import collected_warnings
    from tepo_megatron.runtime.machine import this_machine
    from tepo_megatron.tools.sweep import Sweep, SweepResults, read_sweep, runs_of, shard

    grid = read_sweep(file)
    runs = runs_of(grid, output)
    mine = shard(runs, part)
    with collected_warnings() as sentences:
        grid.check(runs, None if dry_run or table_only else this_machine().gpus, mine)
    for text in sentences:
        echo(f"warning: {text}", err=True)
    if dry_run:
        shared = () if as_json else grid.overrides
        rows = [[run.name, "done" if run.is_done else "to do", " ".join(run.overrides[len(shared) :])] for run in mine]
        show_table(["run", "state", "settings"], rows, as_json=as_json)
        echo(f"{len(mine)} runs of {grid.run}; shared: {' '.join(shared) or '–'}", err=True)
        return
    sweep = Sweep(grid, mine, say=lambda line: echo(line, err=True), jobs=jobs)
    outcomes = [] if table_only else sweep.run()
    result = SweepResults(grid, runs)
    failed = [one for one in outcomes if one.outcome == "failed"]
    if as_json:
        described = [{"run": one.run.name, "said": one.said} for one in failed]
        print_json({"found": as_records(*result.table()), "failed": described})
    else:
        show_table(*result.table())
    for path in result.write(output or grid.output):
        echo(f"wrote {path}", err=as_json)
    for one in failed:
        echo(f"failed: {one.run.name}: {one.said}", err=True)
    stopped = sweep.stopped_by if any(one.outcome == "stopped" for one in outcomes) else None
    raise typer.Exit(int(bool(failed)) if stopped is None else StopRequested(stopped).exit_code)


@app.command("faults")
def _faults(
    seed: Annotated[int, Option(help="Of everything random: moments, bits, processes.")] = 1,
    quick: Annotated[bool, Option("--quick", help="A few of each class: under 4 minutes on two cores; whole: 25.")] = False,
    only: Annotated[str, Option(help="Classes of faults, separated by commas; default: all.")] = "",
    output: Annotated[Path | None, Option(help="Folder. Default: out/faults-SEED[-quick].")] = None,
    as_json: AsJson = False,
) -> None:
    """Inject a cluster's usual faults into tiny runs, and check the results: kills, hangs, damaged checkpoints, full disks,
    strangers, wrong configurations, hostile answers, hostile values at every border, and faults that only a canary sees.

    Exit code 1 if anything was lost. A call with the same seed and folder continues an interrupted one. Writes outcomes.jsonl
    and faults.md. Some faults need root: a small disk, another user.

    [dim]tepo faults --quick[/]

    [dim]tepo faults --seed 7 --only kills,hangs --output out/faults-7[/]
    """
    outlive_readers()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM also ends all started processes
    from tepo_megatron.tools.faults import run as harness
    from tepo_megatron.tools.results import select

    folder = output or Path("out") / f"faults-{seed}{'-quick' * quick}"
    chosen = select(only, harness.CLASSES, "class of faults")
    record = harness.run(chosen, folder, seed=seed, quick=quick, say=lambda line: echo(line, err=True))
    tables = {"faults": record.table(), "silent": record.silent_table()}
    if as_json:
        print_json({name: as_records(*table[:2]) for name, table in tables.items()} | {"lost": record.lost})
    else:
        for table in tables.values():
            if table.rows:
                show_table(*table[:2])
        for line in record.lost:
            echo(f"lost: {line}")
    words = ["tepo faults", f"--seed {seed}", *(["--quick"] if quick else []), *([f"--only {only}"] if only else [])]
    echo(f"wrote {record.write_markdown(folder / 'faults.md', command=' '.join(words))}", err=as_json)
    raise typer.Exit(int(bool(record.lost)))
