"""``tepo data``: a run's problems as the model reads them, and published benchmarks. Starts no server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tepo_megatron.cli.console import print_json, show_table, user_errors
from tepo_megatron.cli.options import AsJson, Overrides, RunOrSetting, load_config, split_run

if TYPE_CHECKING:
    from tepo_megatron.config.data import DataConfig
    from tepo_megatron.tasks.data.sources import Prompt, Source
    from tepo_megatron.tasks.data.tokenizer import Tokenizer


app = typer.Typer(no_args_is_help=True, help="Data: problems as the model will read them, and published benchmarks.")


@app.callback()
def _group() -> None:
    """Data: the problems of a run as the model will read them, and published benchmarks."""


@app.command("show")
def show_command(
    run: RunOrSetting = None,
    overrides: Overrides = None,
    heldout: Annotated[bool, typer.Option("--heldout", help="The held-out problems.")] = False,
    source: Annotated[str | None, typer.Option("--source", metavar="NAME", help="Only this source.")] = None,
    left_out: Annotated[bool, typer.Option("--left-out", help="Show what is left out, and why.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="How many prompts of each source are shown.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Show each source's counts, and its first prompts as the model reads them: special tokens are ⟦names⟧.

    Reads the model's tokenizer and the problems; starts nothing.

    [dim]tepo data show run.yaml --limit 1[/]

    [dim]tepo data show model.path=models/mine data.train=train.parquet data.fields.prompt=question[/]
    """
    with user_errors():
        config = load_config(*split_run(run, overrides))
        config.require_data()
        from tepo_megatron.tasks.data.builtin import resolve_model_path
        from tepo_megatron.tasks.data.sources import read_sources
        from tepo_megatron.tasks.data.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(resolve_model_path(config.model.path))
        if heldout and config.data.heldout is None:
            raise ValueError("data.heldout is not given: there are no held-out problems to show")
        result = read_sources(config.data, "heldout" if heldout else "train", tokenizer)
        if source is not None:
            known = ", ".join(item.name or item.path for item in result)
            result = [item for item in result if source in (item.name, item.path)]
            if not result:
                raise ValueError(f"there is no source {source}; the run has {known}")
        shares = {} if heldout else _shares(config.data)
        rows = [row for item in result for row in _rows(item, tokenizer, limit, left_out=left_out)]
    if as_json:
        print_json({"sources": [_summary(item, shares) for item in result], "prompts": rows})
    else:
        _show(result, rows, shares)


def _shares(config: DataConfig) -> dict[str, float]:
    total = sum(item.weight for item in config.train_sources)
    plain = isinstance(config.train, str)
    return {item.path if plain else item.called: item.weight / total for item in config.train_sources}


def _summary(source: Source, shares: dict[str, float]) -> dict[str, Any]:
    tokens = [prompt.tokens for prompt in source.prompts if prompt.left_out is None]
    return {
        "source": source.name or source.path,
        "path": source.path,
        "share": shares.get(source.name or source.path),
        "problems": len(source.prompts),
        "used": len(tokens),
        "left_out": dict(source.left_out),
        "tokens": {"min": min(tokens), "mean": fmean(tokens), "max": max(tokens)},
    }


def _rows(source: Source, tokenizer: Tokenizer, limit: int, *, left_out: bool) -> Iterator[dict[str, Any]]:
    chosen = [prompt for prompt in source.prompts if (prompt.left_out is not None) == left_out]
    for prompt in chosen[:limit]:
        yield {
            "source": source.name or source.path,
            "id": prompt.problem.id,
            "prompt": _read(prompt, tokenizer),
            "tokens": prompt.tokens or None,  # problems that a filter removes are not encoded
            "answer": prompt.problem.answer,
            "left_out": prompt.left_out,
        }


def _read(prompt: Prompt, tokenizer: Tokenizer) -> str:
    from tepo_megatron.tasks.data.prompts import encode_prompt

    return tokenizer.show(encode_prompt(tokenizer, prompt.problem)) if prompt.tokens else prompt.problem.prompt


def _show(sources: Sequence[Source], rows: Sequence[dict[str, Any]], shares: dict[str, float]) -> None:
    columns = ["source", "share", "problems", "used", "left out", "tokens: least", "mean", "most"]
    summaries = [_summary(item, shares) for item in sources]
    show_table(columns, [_line(item) for item in summaries])
    for notice in (notice for item in sources for notice in item.notices):
        typer.echo(notice)
    for row in rows:
        about = [f"{row['tokens']} tokens" if row["tokens"] else "", f"answer {row['answer']!r}", row["left_out"] or ""]
        typer.echo(f"\n{row['id']}: {', '.join(item for item in about if item)}")
        typer.echo("\n".join(f"  {line}" for line in row["prompt"].split("\n")))


def _line(summary: dict[str, Any]) -> list[str]:
    from rich.markup import escape

    tokens = summary["tokens"]
    return [
        escape(summary["source"]),
        "" if summary["share"] is None else f"{summary['share']:.3g}",
        str(summary["problems"]),
        str(summary["used"]),
        str(summary["problems"] - summary["used"]),
        str(tokens["min"]),
        f"{tokens['mean']:.1f}",
        str(tokens["max"]),
    ]


@app.command("prepare")
def prepare_command(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Such as math500: tepo data benchmarks lists them.")],
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Where problems and digests are kept.")] = Path(
        "data/benchmarks"
    ),
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="PATH", help="The published file, or a folder with it, where there is no network."),
    ] = None,
    family: Annotated[
        str | None, typer.Option("--family", help="Prompts for which models: plain, base, instruct, qwen or reasoning.")
    ] = None,
    accept_changed: Annotated[
        bool, typer.Option("--accept-changed", help="Take a file of another digest from now on.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make problems of published benchmarks: files that are pinned and checked, and a run's section to evaluate on them.

    [dim]tepo data prepare math500 aime24 aime25 --family qwen[/]

    [dim]tepo eval models/mine --run data/benchmarks/benchmarks.yaml[/]

    [dim]tepo data prepare gsm8k --from /shared/downloads/gsm8k[/]
    """
    with user_errors():
        from tepo_megatron.tasks.data.benchmarks.prepare import SETS, prepare

        done = []
        for name in names:
            done.append(prepare(name, to, source=source, family=family, accept_changed=accept_changed))
            if not as_json:
                one = done[-1]
                typer.echo(f"{one.path}: {one.problems} problems of {one.source}")
                if one.recorded:
                    typer.echo(f"  its SHA-256 was not known and is recorded from now on: {one.source_sha256}")
    if as_json:
        rows = [{**asdict(one), "path": str(one.path), "source": str(one.source)} for one in done]
        typer.echo(json.dumps(rows, indent=2))
    else:
        typer.echo(f"to evaluate on them: tepo eval MODEL_DIR --run {to / SETS}")


@app.command("benchmarks")
def benchmarks_command(as_json: AsJson = False) -> None:
    """List the benchmarks that can be prepared, with where their files are."""
    from tepo_megatron.tasks.data.benchmarks.registry import BENCHMARKS

    if as_json:
        shown = ("title", "repository", "revision", "file", "sha256", "problems")
        rows = {name: {field: getattr(item, field) for field in shown} for name, item in BENCHMARKS.items()}
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "benchmark", "problems", "from", "digest")
    for name, item in BENCHMARKS.items():
        known = "known" if item.sha256 else "recorded at first"
        table.add_row(name, item.title, str(item.problems), f"{item.repository} {item.file}", known)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
