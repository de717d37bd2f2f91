"""The command ``tepo``. Every command imports what it needs when it runs: help must not wait for torch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tepo_megatron.doctor import doctor_command
from tepo_megatron.folders import export_command, import_command

if TYPE_CHECKING:
    from tepo_megatron.config import RunConfig

app = typer.Typer(
    name="tepo",
    help="Reinforcement learning of language models with TEPO: Megatron-Core trains, vLLM samples.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(no_args_is_help=True, help="Look at a run's configuration: what it says, and what it may say.")
app.add_typer(config_app, name="config")

Overrides = Annotated[list[str] | None, typer.Argument(metavar="a.b=c", help="Dotted overrides, such as train.steps=10.")]
RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run's configuration.")]


def main() -> None:
    """The console script."""
    app()


@app.command()
def train(
    run: RunFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of the output folder.")] = False,
) -> None:
    """Train a model: sample, reward, score, update, sync, as often as the run says.

    Checks the configuration, then starts as many ranks as engine.parallel needs; under torchrun, this is one of them.

    [dim]tepo train examples/tiny/run.yaml train.steps=20 output=out/short[/]

    [dim]torchrun --nproc-per-node 2 -m tepo_megatron train examples/tiny/run.yaml[/]
    """
    from tepo_megatron.torchrun import launch, run_rank, under_torchrun

    given = [*(overrides or ()), *(["train.resume=true"] if resume else [])]
    with user_errors():
        config = _load(run, given)
    if not under_torchrun():
        raise typer.Exit(launch(["train", str(run), *given], config.engine.parallel.world_size))

    def work(config: Any) -> None:
        from tepo_megatron.train.run import train as train_run

        train_run(config)

    raise typer.Exit(run_rank(config, work))


@app.command()
def serve(
    run: RunFile,
    overrides: Overrides = None,
    node: Annotated[int, typer.Option("--node", metavar="I", help="This node's number among the nodes for rollouts.")] = 0,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", help="How many nodes serve.")] = 1,
) -> None:
    """Serve vLLM on this node for a trainer on another, until interrupted; they meet in rollout.server.registry.

    [dim]tepo serve run.yaml rollout.server.placement=external rollout.server.registry=/shared/out/servers[/]
    """
    from tepo_megatron.torchrun import run_until_interrupted

    def work(config: Any) -> None:
        from tepo_megatron.data.builtin import resolve_model_path
        from tepo_megatron.rollout.serve import Node

        with Node(config, model_dir=resolve_model_path(config.model.path), node=node, nodes=nodes) as servers:
            servers.watch()

    with user_errors():
        code = run_until_interrupted(_load(run, overrides or ()), work)
    raise typer.Exit(code)


@app.command("eval")
def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face folder, such as a run's exported model.")],
    overrides: Overrides = None,
    run: Annotated[Path | None, typer.Option("--run", metavar="RUN.yaml", help="The run to take the rest from.")] = None,
) -> None:
    """Evaluate a model on held-out problems: greedy, and avg@k and pass@k from samples.

    [dim]tepo eval out/tiny/model --run examples/tiny/run.yaml evaluate.samples=8[/]
    """
    with user_errors():
        config = _load(run, overrides or ())
        from tepo_megatron.evaluate.standalone import evaluate_model

        evaluate_model(config, model)


@config_app.command("show")
def show_config(
    run: RunFile,
    overrides: Overrides = None,
    diff: Annotated[bool, typer.Option("--diff", help="Only what differs from the defaults.")] = False,
) -> None:
    """Print a run's configuration, complete, as YAML.

    [dim]tepo config show examples/tiny/run.yaml optimizer.lr=1e-5[/]

    [dim]tepo config show examples/tiny/run.yaml --diff[/]
    """
    from tepo_megatron.config.load import dump_diff, dump_resolved

    with user_errors():
        config = _load(run, overrides or ())
        typer.echo(dump_diff(config) if diff else dump_resolved(config), nl=False)


@config_app.command("schema")
def show_schema(
    under: Annotated[str | None, typer.Argument(metavar="PATH", help="Only fields whose path starts so.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON schema, for editors and tools.")] = False,
) -> None:
    """Print every field of a run: its path, what it takes, its default, what it means.

    [dim]tepo config schema rollout.server[/]

    [dim]tepo config schema --json > run.schema.json[/]
    """
    import json

    from tepo_megatron.config.schema import json_schema, schema_rows

    if as_json:
        typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))
        return
    from tepo_megatron.config.table import schema_table

    rows = [row for row in schema_rows() if under is None or f"{row.path}.".startswith(f"{under.rstrip('.')}.")]
    with user_errors():
        if not rows:
            raise ValueError(f"no field is {under} or below it; 'tepo config schema' lists all")
    _print(schema_table(rows))


@app.command()
def plan(
    run: RunFile,
    overrides: Overrides = None,
    prompt_tokens: Annotated[float | None, typer.Option(help="Mean length of prompts; default: half of the longest.")] = None,
    response_tokens: Annotated[float | None, typer.Option(help="The same of responses.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Build every rank's model without memory, and count.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For tools.")] = False,
) -> None:
    """Reckon what a run needs: memory of trainer and servers, traffic, time of a step. No GPU, and without --exact no torch.

    Exit code 1 if it does not fit, with what to change.

    [dim]tepo plan examples/llama3.3-70b/run.yaml cluster.rollout_nodes=8 rollout.server.count=16[/]
    """
    from tepo_megatron.launch.plan import check_exact, check_plan, make_plan
    from tepo_megatron.launch.plan.report import plan_json, plan_notes, plan_tables

    with user_errors():
        found = make_plan(_load(run, overrides or ()), prompt_tokens=prompt_tokens, response_tokens=response_tokens)
        counts = check_exact(found) if exact else None
        if as_json:
            typer.echo(plan_json(found, counts))
        else:
            for table in plan_tables(found):
                _print(table)
            for line in plan_notes(found, counts):
                typer.echo(line)
        check_plan(found)


@app.command()
def plot(
    outputs: Annotated[list[Path], typer.Argument(metavar="OUT", help="Output folders of runs, or their metrics.jsonl.")],
    png: Annotated[Path | None, typer.Option("--png", help="Where to; default: OUT/curves.png or comparison.png.")] = None,
    title: Annotated[str | None, typer.Option("--title", help="Above the picture; default: the folders' names.")] = None,
) -> None:
    """Draw the curves of a run, or of several in one picture to compare them.

    [dim]tepo plot out/tiny[/]

    [dim]tepo plot out/tepo out/grpo --png tepo-grpo.png[/]
    """
    from tepo_megatron.train.plots import plot_comparison, plot_curves

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


@contextmanager
def user_errors() -> Iterator[None]:
    """Turns an error that is a sentence for the user into that sentence on standard error and exit code 1; Ctrl-C into 130."""
    from tepo_megatron.errors import is_ours, wants_traceback
    from tepo_megatron.torchrun import INTERRUPTED, print_error

    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (ValueError, RuntimeError) as error:
        if wants_traceback() or not is_ours(error):
            raise
        print_error(str(error))
        raise typer.Exit(1) from error


app.command("import")(user_errors()(import_command))
app.command("export")(user_errors()(export_command))


def _load(run: Path | None, overrides: Sequence[str]) -> RunConfig:
    """``load_run``, with its warnings as sentences, said by one process of a run."""
    from tepo_megatron.config.load import load_run
    from tepo_megatron.torchrun import speaks_first

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        config = load_run(run, overrides)
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        if speaks_first():
            typer.echo(f"warning: {text}", err=True)
    return config


def _lazy(name: str, target: str, text: str, default: str | None = None) -> None:
    """Mounts the Typer app ``module:attribute`` as ``tepo <name>``; its module is imported when ``tepo <name>`` is.
    ``default`` is the command that is meant where the first word names none.
    """

    class Lazy(TyperGroup):
        def _load(self) -> TyperGroup:
            module, attribute = target.split(":")
            return typer.main.get_group(getattr(import_module(module), attribute))

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if default is not None and args and args[0] not in (*self._load().commands, *ctx.help_option_names):
                args = [default, *args]
            return super().parse_args(ctx, args)

        def list_commands(self, ctx: Any) -> list[str]:
            return self._load().list_commands(ctx)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return self._load().get_command(ctx, cmd_name)

    group = typer.Typer(cls=Lazy, no_args_is_help=True, help=text)
    group.callback()(lambda: None)
    app.add_typer(group, name=name)


app.command("doctor")(doctor_command)
_lazy("objective", "tepo_megatron.objective.table:app", "Objectives: what there is to choose from.")
_lazy("launch", "tepo_megatron.launch.commands:app", "Run on a cluster: tepo launch RUN.yaml.", default="run")
_lazy("reshard", "tepo_megatron.reshard:app", "Weights from Megatron's shards to vLLM's: tepo reshard plan.")
_lazy("bench", "tepo_megatron.bench.app:app", "Measure parts of the system on this machine.")


def _distinct_names(files: list[Path]) -> list[str]:
    """The folders' names; their paths where names repeat."""
    folders = [file.resolve().parent for file in files]
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(file.parent) for file in files]


def _print(renderable: Any) -> None:
    from rich.console import Console

    # In a pipe there is no width to fit into: cells are better whole than cut.
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160).print(renderable)
