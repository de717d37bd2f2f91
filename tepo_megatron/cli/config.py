from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from tepo_megatron.cli.console import AsJson, Overrides, RunOrSetting, load_config, new_table, print_json, show, split_run
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
    from rich.markup import escape

    from tepo_megatron.config.schema import json_schema, schema_rows, with_plugins

    with with_plugins(plugins or ()):
        if as_json:
            print_json(json_schema())
            return
        listed = schema_rows(of_lists=True, joined=True)
        rows = [row for row in listed if under is None or f"{row.path}.".startswith(f"{under.rstrip('.')}.")]
        if not rows:
            raise ValueError(f"no field is {under} or below it; 'tepo config schema' lists all")
    table = new_table("field, and what it takes", "default", "meaning")
    table.columns[1].max_width, table.columns[2].min_width = 20, 28
    for row in rows:
        condition = f"[dim]only with {escape(row.when)}:[/] " if row.when else ""
        field = f"[bold]{row.path}[/]\n[dim]  {escape(row.allowed)}[/]"
        table.add_row(field, escape(row.default), condition + escape(row.description))
    show(table)


def _convert(name: str, file: Path) -> None:
    from tepo_megatron.config.load import ConfigError, as_yaml, dump_diff
    from tepo_megatron.config.peer_files import read_peer_file
    from tepo_megatron.config.peers import convert

    settings, left = convert(name, read_peer_file(name, file))
    try:
        config = load_config(None, [f"{field}={as_yaml(value)}" for field, value in settings.items()])
    except ConfigError as error:
        raise ConfigError(str(file), error.problems) from error
    left.append("settings that equal a default here are left out: tepo config show FILE has all")
    comments = (" ".join(sentence.splitlines()) for sentence in left)  # their file's text must not become ours
    echo("".join(f"# {comment}\n" for comment in comments) + dump_diff(config).rstrip("\n"))


def _add_converter(name: str, what: str, example: str) -> None:
    def convert(file: Annotated[Path, Argument(metavar="FILE", help="Its configuration, as YAML.")]) -> None:
        _convert(name, file)

    about = f"Convert a configuration of {what} into a run's; comments say what has no field here."
    config_app.command(f"from-{name}", help=f"{about}\n\n[dim]tepo config from-{name} {example} > run.yaml[/]")(convert)


_add_converter("trl", "TRL's GRPO trainer", "grpo.yaml")
_add_converter("verl", "verl", "ppo_trainer.yaml")
_add_converter("nemo-rl", "NeMo-RL's GRPO", "grpo_math_1B.yaml")


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
    from tepo_megatron.config.load import collected_warnings
    from tepo_megatron.plan import check_plan, make_plan
    from tepo_megatron.plan.tables import plan_json, plan_notes, plan_tables

    result = make_plan(load_config(*split_run(run, overrides)), prompt_tokens=prompt_tokens, response_tokens=response_tokens)
    counts = result.check_exact() if exact else None
    if as_json:
        echo(plan_json(result, counts))
    else:
        for table in plan_tables(result):
            show(table)
        for line in plan_notes(result, counts):
            echo(line)
    with collected_warnings() as sentences:
        check_plan(result)
    for text in sentences:
        echo(f"warning: {text}", err=True)


@app.command("init")
def _init(
    file: Annotated[Path, Argument(metavar="[RUN.yaml]", help="The file to write.")] = Path("run.yaml"),
    model: Annotated[str | None, Option(metavar="FOLDER", help="Hugging Face folder of the model.")] = None,
    train: Annotated[str | None, Option(metavar="PATH", help="Problems: JSON lines, JSON, CSV, Parquet, or a folder.")] = None,
    heldout: Annotated[str | None, Option(metavar="PATH", help="The same, to evaluate on; - for none.")] = None,
    split: Annotated[str | None, Option(metavar="NAME", help="Of a folder: the split to train on.")] = None,
    heldout_split: Annotated[str | None, Option(metavar="NAME", help="The split to evaluate on.")] = None,
    prompt_column: Annotated[
        str | None, Option(metavar="NAME", help="Where the prompt is, if not in prompt or messages.")
    ] = None,
    answer_column: Annotated[str | None, Option(metavar="NAME", help="Where the answer is, if not in answer.")] = None,
    heldout_prompt_column: Annotated[str | None, Option(metavar="NAME", help="The same of --heldout, if it differs.")] = None,
    heldout_answer_column: Annotated[str | None, Option(metavar="NAME", help="The same of --heldout, if it differs.")] = None,
    chat_template: Annotated[
        bool | None, Option("--chat-template/--no-chat-template", help="Whether a prompt is a user's message.")
    ] = None,
    verifier: Annotated[str | None, Option(metavar="NAME", help="A built-in one, or file.py:function.")] = None,
    gpus: Annotated[int | None, Option(min=0, help="GPUs of a node; 0: on the CPU.")] = None,
    nodes: Annotated[int | None, Option(min=1, help="Nodes of a Slurm cluster; 1: this machine.")] = None,
    output: Annotated[Path | None, Option(help="The run's folder; default: out/ and the model's name.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Write over the file if it is there.")] = False,
) -> None:
    """Ask what you have (model, data, verifier, GPUs), and write a run's file that passes tepo doctor --run.

    Options answer their questions.

    [dim]tepo init[/]

    [dim]tepo init mine.yaml --model models/mine --train train.csv --heldout test.csv --verifier last_number --gpus 0[/]
    """
    from tepo_megatron.cli.new_run import NewRun

    if file.exists() and not overwrite:
        raise ValueError(f"{file} is there already; give another name, or --overwrite")
    new = NewRun(model)
    new.ask_data(train, split, prompt_column, answer_column)
    new.ask_heldout(heldout, heldout_split, heldout_prompt_column, heldout_answer_column)
    new.ask_template(chat_template)
    new.ask_verifier(verifier)
    new.ask_machines(gpus, nodes)
    text = new.text(file, output)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    launch = "tepo launch" if new.nodes > 1 else "tepo train"
    echo(f"wrote {file}; next: tepo doctor --run {file}, then {launch} {file}")
