"""``tepo plan``."""

from __future__ import annotations

from typing import Annotated

import typer

from tepo_megatron.cli.console import show
from tepo_megatron.cli.errors import user_errors
from tepo_megatron.cli.options import AsJson, Overrides, RunOrSetting, load_config, split_run


def plan(
    run: RunOrSetting = None,
    overrides: Overrides = None,
    prompt_tokens: Annotated[float | None, typer.Option(help="Mean length of prompts; default: half of the longest.")] = None,
    response_tokens: Annotated[float | None, typer.Option(help="The same of responses.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Build every rank's model without memory, and count.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compute what a run needs: memory of trainer and servers, traffic, time of a step. No GPU, and without --exact no torch.

    Exit code 1 if it does not fit, with what to change.

    [dim]tepo plan examples/llama3.3-70b/run.yaml cluster.rollout_nodes=8 rollout.server.count=16[/]
    """
    from tepo_megatron.plan import check_exact, check_plan, make_plan
    from tepo_megatron.plan.tables import plan_json, plan_notes, plan_tables

    with user_errors():
        found = make_plan(load_config(*split_run(run, overrides)), prompt_tokens=prompt_tokens, response_tokens=response_tokens)
        counts = check_exact(found) if exact else None
        if as_json:
            typer.echo(plan_json(found, counts))
        else:
            for table in plan_tables(found):
                show(table)
            for line in plan_notes(found, counts):
                typer.echo(line)
        check_plan(found)
