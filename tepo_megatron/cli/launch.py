"""``tepo launch``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tepo_megatron.cli.console import RunFile, print_json, show, user_errors
from tepo_megatron.config import RunConfig
from tepo_megatron.runtime.text import echo

if TYPE_CHECKING:
    from tepo_megatron.launch.nemo import Scripts
    from tepo_megatron.plan import Plan

app = typer.Typer()

Overrides = Annotated[list[str] | None, typer.Argument(metavar="a.b=c", help="Dotted overrides, as they were launched with.")]


class _Executor(StrEnum):
    SLURM = "slurm"
    LOCAL = "local"


class _LogRole(StrEnum):
    JOB = "job"
    TRAIN = "train"
    SERVE = "serve"
    SERVERS = "servers"


@app.command("run")
def _run(
    run: RunFile,
    overrides: Overrides = None,
    executor: Annotated[
        _Executor, typer.Option("--executor", help="local: the training node is this machine.")
    ] = _Executor.SLURM,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the scripts; submit, write and ask nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of the output folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: plan and scripts for tools.")] = False,
) -> None:
    """Submit a run to Slurm through NeMo-Run: the first nodes train, the others serve vLLM.

    [dim]tepo launch examples/llama3.3-70b/run.yaml --dry-run[/]

    [dim]tepo launch examples/llama3.3-70b/run.yaml cluster.partition=h100 cluster.account=rl[/]
    """
    from tepo_megatron.launch import nemo
    from tepo_megatron.launch.job import Job
    from tepo_megatron.plan import check_plan, make_plan

    with user_errors():
        config = _load(run, [*(overrides or ()), *(["train.resume=true"] if resume else [])], trains=True)
        if executor is _Executor.SLURM:
            Job(config).check_time_limit()
        plan = make_plan(config)
        if dry_run and not as_json:
            _show_plan(plan)
        check_plan(plan)
        others = config.cluster.train_nodes + config.cluster.rollout_nodes - 1
        if executor is _Executor.LOCAL and others and not dry_run:
            raise ValueError(
                f"--executor local has one node, but the run wants {others} more (cluster.train_nodes, cluster.rollout_nodes); "
                "set them to 1 and 0, or use --dry-run"
            )
        scripts, code = nemo.write_scripts(config), 0
        if dry_run and as_json:
            from tepo_megatron.plan.tables import plan_json

            print_json({"plan": json.loads(plan_json(plan)), "scripts": _scripts(scripts, executor)})
        elif dry_run:
            _show_scripts(scripts, executor)
        elif executor is _Executor.LOCAL:
            code = _run_here(config, scripts.roles)
        else:
            _submit(config, scripts.roles)
    raise typer.Exit(code)


@app.command("status")
def _status(run: RunFile, overrides: Overrides = None) -> None:
    """Print Slurm's status of the newest job of the run's output folder.

    [dim]tepo launch status OUT/resolved.yaml[/]
    """
    from tepo_megatron.launch import nemo

    with user_errors():
        config = _load(run, overrides or ())
        cluster = nemo.connect(config)
        job = cluster.newest_job
        echo(f"job {job}: {cluster.status(job)}")


@app.command("logs")
def _logs(
    run: RunFile,
    overrides: Overrides = None,
    role: Annotated[
        _LogRole, typer.Option("--role", help="Whose: of the batch script, trainer's nodes, servers' nodes, vLLM.")
    ] = (_LogRole.TRAIN),
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank of the trainer.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many, from the end.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing, until Ctrl-C.")] = False,
) -> None:
    """Print the ends of the logs of the newest job.

    [dim]tepo launch logs OUT/resolved.yaml --rank 3[/]
    """
    from tepo_megatron.launch import nemo

    with user_errors():
        config = _load(run, overrides or ())
        cluster = nemo.connect(config)
        cluster.tail(cluster.log_pattern(role, rank), lines, follow=follow)


@app.command("cancel")
def _cancel(run: RunFile, overrides: Overrides = None) -> None:
    """Cancel the newest job of the run's output folder; saved checkpoints stay, for --resume."""
    from tepo_megatron.launch import nemo

    with user_errors():
        config = _load(run, overrides or ())
        cluster = nemo.connect(config)
        job = cluster.newest_job
        cluster.cancel(job)
        echo(f"cancelled job {job}")


def _load(path: Path, overrides: Sequence[str], *, trains: bool = False) -> RunConfig:
    from tepo_megatron.config.load import load_run
    from tepo_megatron.launch.job import on_nodes

    config = load_run(path, overrides)
    if trains:
        config.require_data()
    return on_nodes(config)


def _show_plan(plan: Plan) -> None:
    from tepo_megatron.plan.tables import plan_notes, plan_tables

    for table in plan_tables(plan):
        show(table)
    for line in plan_notes(plan):
        echo(line)
    echo("")


def _scripts(scripts: Scripts, executor: _Executor) -> dict[str, str]:
    return {**({"sbatch": scripts.sbatch} if executor is _Executor.SLURM else {}), **scripts.roles}


def _show_scripts(scripts: Scripts, executor: _Executor) -> None:
    for name, text in _scripts(scripts, executor).items():
        echo(f"===== {name} {'=' * (120 - len(name))}\n{text.strip()}\n")


def _submit(config: RunConfig, scripts: dict[str, str]) -> None:
    from tepo_megatron.launch import nemo
    from tepo_megatron.launch.record import submission

    cluster = nemo.connect(config)
    cluster.check()
    if config.train.save_every == 0 and config.train.save_minutes == 0:
        echo(
            "warning: train.save_every = 0 and train.save_minutes = 0: a job that ends without a warning begins anew; set one",
            err=True,
        )
    cluster.upload(scripts, submission(sys.argv))
    job = nemo.submit(config)
    cluster.save_job(job)
    echo(f"submitted job {job}; see: tepo launch status|logs|cancel {config.output}/resolved.yaml")


def _run_here(config: RunConfig, scripts: dict[str, str]) -> int:
    from tepo_megatron.launch import nemo
    from tepo_megatron.launch.record import submission

    cluster = nemo.connect(config)
    cluster.check()
    cluster.upload(scripts, submission(sys.argv))
    return nemo.run_locally(config)
