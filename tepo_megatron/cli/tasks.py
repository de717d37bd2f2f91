"""``tepo reward`` and ``tepo environment``: try a verifier on recorded responses, serve an environment."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tepo_megatron.cli.console import show_table, user_errors
from tepo_megatron.cli.options import Overrides, RunFile, load_config

if TYPE_CHECKING:
    from tepo_megatron.tasks.protocol import RewardResult
    from tepo_megatron.tasks.reward.recorded import RecordedGroup


reward_app = typer.Typer(no_args_is_help=True, help="Rewards: try a verifier on recorded responses.")

_WIDEST = 60


@reward_app.callback()
def _reward_group() -> None:
    """Rewards: try a verifier on recorded responses."""


@reward_app.command("try")
def try_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A run's samples.jsonl, or JSON lines with responses.")],
    overrides: Overrides = None,
    run: Annotated[Path | None, typer.Option("--run", metavar="RUN.yaml", help="The run whose reward section counts.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many lines are scored, from the first.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="For tools.")] = False,
) -> None:
    """Score recorded responses: reward, components, time, and why one failed; exit code 1 if any did.

    A line of FILE is one of a run's samples.jsonl, or an object with prompt, answer, and response or responses.

    [dim]tepo reward try out/tiny/samples.jsonl reward.verifier=rewards.py:my_reward[/]
    """
    with user_errors():
        config = load_config(run, overrides or ())
        from tepo_megatron.tasks.reward.recorded import read_recorded
        from tepo_megatron.tasks.reward.verifier_task import VerifierTask, reward_configs

        groups = read_recorded(file)[:limit]
        with VerifierTask(reward_configs(config.reward, config.data)) as task:
            items = [(group.problem, text) for group in groups for text in group.responses]
            results = task.score(items, [number for number, group in enumerate(groups) for _ in group.responses])
    rows = _rows(groups, results)
    summary = _summary(config.reward.verifier, rows)
    if as_json:
        typer.echo(json.dumps({**summary, "responses": rows}, ensure_ascii=False))
    else:
        _show(rows, summary)
    if summary["failed"]:
        raise typer.Exit(1)


def _rows(groups: Sequence[RecordedGroup], results: Sequence[RewardResult]) -> list[dict[str, Any]]:
    texts = [(group.problem.id, text) for group in groups for text in group.responses]
    return [
        {
            "problem": problem,
            "response": str(text),
            "reward": result.reward,
            "components": dict(result.parts),
            "seconds": round(result.seconds, 6),
            "error": result.error,
        }
        for (problem, text), result in zip(texts, results, strict=True)
    ]


def _summary(verifier: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scored = [row for row in rows if row["error"] is None]
    names = list(dict.fromkeys(name for row in scored for name in row["components"]))
    return {
        "verifier": verifier,
        "mean": fmean(row["reward"] for row in scored) if scored else None,
        "components": {name: fmean(row["components"].get(name, 0.0) for row in scored) for name in names},
        "seconds": fmean(row["seconds"] for row in rows),
        "failed": len(rows) - len(scored),
    }


def _show(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    names = list(summary["components"])
    lines = [
        [
            f"{_short(row['problem'], 20)}  {_short(row['response'])}",
            *(_figure(row["components"].get(name)) for name in names),
            "failed" if row["error"] else _figure(row["reward"]),
            f"{1000 * row['seconds']:.1f}",
        ]
        for row in rows
    ]
    last = ["mean", *(_figure(summary["components"][name]) for name in names), _figure(summary["mean"])]
    show_table(["problem, response", *names, "reward", "ms"], [*lines, [*last, f"{1000 * summary['seconds']:.1f}"]])
    for error in dict.fromkeys(row["error"] for row in rows if row["error"]):
        typer.echo(f"failed: {error}")
    typer.echo(f"{summary['verifier']}: {len(rows)} responses, {summary['failed']} failed")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _short(text: str, most: int = _WIDEST) -> str:
    from rich.markup import escape

    line = " ".join(text.split())
    return escape(line if len(line) <= most else f"{line[: most - 1]}…")


environment_app = typer.Typer(no_args_is_help=True, help="Environments: run them for trainers on other machines.")


@environment_app.callback()
def _environment_group() -> None:
    """Environments: run them for trainers on other machines."""


@environment_app.command()
def serve(
    run: RunFile,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="The address to listen on: of the nodes' inner network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one, which is printed.")] = 8400,
    key_file: Annotated[
        Path, typer.Option(help="The file with the key, written if it is not there; trainers need the same.")
    ] = Path("environment.key"),
) -> None:
    """Run the environment of a configuration until Ctrl-C, for trainers that name it in environment.servers.

    [dim]tepo environment serve run.yaml --host 10.0.0.7 --key-file keys/environment[/]
    """
    with user_errors():
        loaded = load_config(run, overrides or ())
        config = loaded.environment
        if config is None:
            raise ValueError(f"{run} has no section environment; there is nothing to serve")
        from tepo_megatron.tasks.environments.host import make_key
        from tepo_megatron.tasks.environments.service import EnvironmentService

        try:
            key = make_key(key_file)
            service = EnvironmentService(config, host=host, port=port, key=key, sampling=loaded.rollout.sampling)
        except OSError as error:
            raise ValueError(
                f"{host}:{port} cannot be listened on ({error.strerror}); give another --host or --port"
            ) from error
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: service.stop())
        typer.echo(f"{config.name} at {service.url}, key in {key_file}")
        if service.notice:
            typer.echo(service.notice)
        service.serve()
