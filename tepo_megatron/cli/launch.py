from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from tepo_megatron.cli.console import RunFile, print_json, show
from tepo_megatron.config import RunConfig
from tepo_megatron.config.cluster import ExecutorName
from tepo_megatron.config.load import collected_warnings, load_run
from tepo_megatron.launch import nemo
from tepo_megatron.launch.executors import run_here, submit, write_scripts
from tepo_megatron.launch.job import Job, on_nodes
from tepo_megatron.launch.record import submission
from tepo_megatron.plan import check_plan, make_plan
from tepo_megatron.plan.tables import plan_json, plan_notes, plan_tables
from tepo_megatron.runtime.text import echo

app = typer.Typer()

_Overrides = Annotated[list[str] | None, Argument(metavar="a.b=c", help="Dotted overrides, as they were launched with.")]


@app.command("run")
def _run(
    run: RunFile,
    overrides: _Overrides = None,
    executor: Annotated[ExecutorName | None, Option(help="Short for cluster.executor=NAME.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the scripts; submit, write and ask nothing.")] = False,
    resume: Annotated[bool, Option("--resume", help="Go on from the newest checkpoint of the output folder.")] = False,
    as_json: Annotated[bool, Option("--json", help="With --dry-run: plan and scripts for tools.")] = False,
) -> None:
    """Submit a run through NeMo-Run, to Slurm or another executor: the first nodes train, the others serve vLLM.

    [dim]tepo launch examples/llama3.3-70b/run.yaml --dry-run[/]

    [dim]tepo launch examples/llama3.3-70b/run.yaml cluster.partition=h100 cluster.account=rl[/]
    """
    if as_json and not dry_run:
        raise ValueError("--json shows what --dry-run does; add --dry-run, or leave --json out to submit the job")
    chosen = [f"cluster.executor={executor}"] if executor else []
    config = _load(run, [*(overrides or ()), *chosen, *(["train.resume=true"] if resume else [])], trains=True)
    if config.cluster.executor == "slurm":
        Job(config).check_time_limit()
    plan = make_plan(config)
    if dry_run and not as_json:
        for table in plan_tables(plan):
            show(table)
        for line in plan_notes(plan):
            echo(line)
        echo("")
    with collected_warnings() as sentences:
        check_plan(plan)
    for text in sentences:
        echo(f"warning: {text}", err=True)
    job = secrets.token_hex(5)
    texts, code = write_scripts(config, job) if config.cluster.executor != "slurm" else nemo.write_scripts(config), 0
    if dry_run and as_json:
        print_json({"plan": json.loads(plan_json(plan)), "scripts": texts})
    elif dry_run:
        for name, text in texts.items():
            echo(f"===== {name} {'=' * (120 - len(name))}\n{text.strip()}\n")
    else:
        code = _launch(config, texts, job)
    raise typer.Exit(code)


def _launch(config: RunConfig, texts: Mapping[str, str], job: str) -> int:
    cluster, on_slurm = nemo.connect(config), config.cluster.executor == "slurm"
    cluster.check()
    if on_slurm and config.train.save_every == 0 and config.train.save_minutes == 0:
        echo(
            "warning: train.save_every = 0 and train.save_minutes = 0: a job that ends without a warning begins anew; set one",
            err=True,
        )
    cluster.upload({name: text for name, text in texts.items() if name.endswith(".sh")}, submission(sys.argv))
    if config.cluster.is_one_machine:
        cluster.save_job(job)
        return run_here(config, job)
    if on_slurm:
        job = nemo.submit(config)
    else:
        submit(config, job)
    echo(f"submitted job {job}; see: tepo launch status|logs|cancel {config.output}/resolved.yaml")
    cluster.save_job(job)
    return 0


@app.command("status")
def _status(run: RunFile, overrides: _Overrides = None) -> None:
    """Print the status of the newest job of the run's output folder.

    [dim]tepo launch status OUT/resolved.yaml[/]
    """
    cluster = nemo.connect(_load(run, overrides))
    job = cluster.newest_job
    echo(f"job {job}: {cluster.status(job)}")


@app.command("logs")
def _logs(
    run: RunFile,
    overrides: _Overrides = None,
    role: Annotated[
        Literal["job", "train", "serve", "servers"],
        Option(help="Whose: of the batch script, trainer's nodes, servers' nodes, vLLM."),
    ] = "train",
    rank: Annotated[int | None, Option(min=0, help="Only this rank of the trainer.")] = None,
    lines: Annotated[int, Option("--lines", "-n", min=1, help="How many, from the end.")] = 20,
    follow: Annotated[bool, Option("--follow", "-f", help="Go on printing, until Ctrl-C.")] = False,
) -> None:
    """Print the ends of the logs of the newest job.

    [dim]tepo launch logs OUT/resolved.yaml --rank 3[/]
    """
    nemo.connect(_load(run, overrides)).show_logs(role, rank, lines, follow=follow)


@app.command("cancel")
def _cancel(run: RunFile, overrides: _Overrides = None) -> None:
    """Cancel the newest job of the run's output folder; saved checkpoints stay, for --resume."""
    cluster = nemo.connect(_load(run, overrides))
    job = cluster.newest_job
    cluster.cancel(job)
    echo(f"cancelled job {job}")


def _load(path: Path, overrides: Sequence[str] | None, *, trains: bool = False) -> RunConfig:
    config = load_run(path, overrides or ())
    if trains:
        config.require_data()
    return on_nodes(config)
