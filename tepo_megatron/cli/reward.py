"""``tepo reward``: a verifier tried on recorded responses, without a trainer and without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tepo_megatron.cli.console import show_table
from tepo_megatron.cli.errors import user_errors
from tepo_megatron.cli.options import Overrides, load_config

if TYPE_CHECKING:
    from tepo_megatron.tasks.protocol import RewardResult
    from tepo_megatron.tasks.reward.recorded import RecordedGroup

app = typer.Typer(no_args_is_help=True, help="Rewards: try a verifier on recorded responses.")

_WIDEST = 60


@app.callback()
def _group() -> None:
    """Rewards: try a verifier on recorded responses."""


@app.command("try")
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
    """On one line, and no bracket of it taken for a style."""
    from rich.markup import escape

    line = " ".join(text.split())
    return escape(line if len(line) <= most else f"{line[: most - 1]}…")
