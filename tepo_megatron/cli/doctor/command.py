"""The command ``tepo doctor``."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tepo_megatron.cli.console import show, user_errors
from tepo_megatron.cli.doctor.diagnosis import Diagnosis, diagnose, has_gpu, is_fit
from tepo_megatron.cli.doctor.machine_checks import CHECKS, LAUNCH_CHECKS
from tepo_megatron.cli.doctor.node_checks import node_checks, node_names
from tepo_megatron.cli.options import AsJson, Overrides, load_config

_COLOURS = {"ok": "green", "warn": "yellow", "missing": "dim", "fail": "red"}


def _as_json(checks: Sequence[Diagnosis]) -> str:
    return json.dumps(
        {"fit_for_cpu": is_fit(checks), "checks": [asdict(check) for check in checks]}, indent=2, ensure_ascii=False
    )


def _table(checks: Sequence[Diagnosis], purpose: str = "A run on CPU") -> Table:
    caption = f"[green]{purpose} has all that it needs.[/]"
    if not is_fit(checks):
        broken = [check.name for check in checks if check.needed and check.status in ("missing", "fail")]
        caption = f"[red]{purpose} still needs: {escape(', '.join(broken))}.[/]"
    table = Table(title=f"tepo doctor, {platform.node()}", title_justify="left", caption=caption, caption_justify="left")
    for heading in ("", "status", "found", "what it enables, or how to correct it"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        status = f"[{_COLOURS[check.status]}]{check.status}[/]"
        table.add_row(check.name, status, escape(check.detail), escape(check.advice))
    return table


def doctor(
    overrides: Overrides = None,
    as_json: AsJson = False,
    launch: Annotated[bool, typer.Option("--launch", help="Only what submitting jobs needs.")] = False,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="RUN.yaml", help="Also model, data, verifier, disk and servers of a run.")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option("--nodes", metavar="N1,N2", help="Also whether nodes answer, and their clocks.")
    ] = None,
) -> None:
    """Look at this machine and environment: what is there, what is missing, what it would enable.

    Exit code 1 if something that a run on CPU (or on this machine's GPU) needs is missing or broken, or a node does not answer.

    [dim]tepo doctor --run examples/tiny/run.yaml[/]

    [dim]tepo doctor model.path=models/mine data.train=train.csv reward.verifier=exact[/]
    """
    selected = list(LAUNCH_CHECKS if launch else CHECKS)
    with user_errors():
        names = node_names(nodes) if nodes is not None else []
        if run is not None or overrides:
            from tepo_megatron.cli.doctor.run_checks import run_checks

            selected += run_checks(load_config(run, overrides or ()))
    checks = diagnose(selected) + (node_checks(names) if names else [])
    if as_json:
        typer.echo(_as_json(checks))
    else:
        purpose = "Launching" if launch else "A run on GPU" if has_gpu() else "A run on CPU"
        show(_table(checks, purpose))
    raise typer.Exit(0 if is_fit(checks) else 1)
