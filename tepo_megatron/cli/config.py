from __future__ import annotations

import sys
from typing import Annotated

import typer
from typer import Argument, Option

from tepo_megatron.cli.console import AsJson, Overrides, RunOrSetting, load_config, print_json, show, split_run, user_errors
from tepo_megatron.runtime.text import echo

app = typer.Typer()
config_app = typer.Typer(no_args_is_help=True, help="Look at a run's configuration: what it says, and what it may say.")


@config_app.command("show")
def _show_config(
    run: RunOrSetting = None,
    overrides: Overrides = None,
    diff: Annotated[bool, Option("--diff", help="Only what differs from the defaults.")] = False,
) -> None:
    """Print a run's complete configuration as YAML.

    [dim]tepo config show examples/tiny/run.yaml --diff[/]
    """
    from tepo_megatron.config.load import dump_diff, dump_resolved

    with user_errors():
        config = load_config(*split_run(run, overrides))
        sys.stdout.write(dump_diff(config) if diff else dump_resolved(config))  # YAML writes no control character as it is


@config_app.command("schema")
def _show_schema(
    under: Annotated[str | None, Argument(metavar="PATH", help="Only fields whose path starts so.")] = None,
    plugins: Annotated[
        list[str] | None, Option("--plugin", help="With the kinds of this plugin of an objective: my_objective.py.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="JSON schema, for editors and tools.")] = False,
) -> None:
    """Print every field of a run: path, values, default, meaning.

    [dim]tepo config schema objective.trust_region --plugin my_objective.py[/]

    [dim]tepo config schema --json > run.schema.json[/]
    """
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    from tepo_megatron.config.schema import json_schema, schema_rows, with_plugins

    with user_errors(), with_plugins(plugins or ()):
        if as_json:
            print_json(json_schema())
            return
        listed = schema_rows(of_lists=True)
        rows = [row for row in listed if under is None or f"{row.path}.".startswith(f"{under.rstrip('.')}.")]
        if not rows:
            raise ValueError(f"no field is {under} or below it; 'tepo config schema' lists all")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_lines=False)
    table.add_column("field, and what it takes", overflow="fold")
    table.add_column("default", max_width=20, overflow="fold")
    table.add_column("meaning", min_width=28)
    for row in rows:
        condition = f"[dim]only with {escape(row.when)}:[/] " if row.when else ""
        field = f"[bold]{row.path}[/]\n[dim]  {escape(row.allowed)}[/]"
        table.add_row(field, escape(row.default), condition + escape(row.description))
    show(table)


@app.command("plan")
def _plan(
    run: RunOrSetting = None,
    overrides: Overrides = None,
    prompt_tokens: Annotated[float | None, Option(help="Mean length of prompts; default: half of the longest.")] = None,
    response_tokens: Annotated[float | None, Option(help="The same of responses.")] = None,
    exact: Annotated[bool, Option("--exact", help="Build every rank's model without memory, and count.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compute what a run needs: memory of trainer and servers, traffic, time of a step. No GPU, and without --exact no torch.

    Exit code 1 if it does not fit, with what to change.

    [dim]tepo plan examples/llama3.3-70b/run.yaml cluster.rollout_nodes=8 rollout.server.count=16[/]
    """
    from tepo_megatron.plan import check_exact, check_plan, make_plan
    from tepo_megatron.plan.tables import plan_json, plan_notes, plan_tables

    with user_errors():
        result = make_plan(
            load_config(*split_run(run, overrides)), prompt_tokens=prompt_tokens, response_tokens=response_tokens
        )
        counts = check_exact(result) if exact else None
        if as_json:
            echo(plan_json(result, counts))
        else:
            for table in plan_tables(result):
                show(table)
            for line in plan_notes(result, counts):
                echo(line)
        check_plan(result)
