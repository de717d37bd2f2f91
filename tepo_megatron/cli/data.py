from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tepo_megatron.cli.console import (
    AsJson,
    Overrides,
    RunFile,
    RunOrSetting,
    load_config,
    print_json,
    show,
    show_table,
    split_run,
    user_errors,
)
from tepo_megatron.runtime.preemption import not_ignored
from tepo_megatron.runtime.streams import outlive_readers
from tepo_megatron.runtime.text import echo

if TYPE_CHECKING:
    from tepo_megatron.config.data import DataConfig
    from tepo_megatron.tasks.data.sources import Prompt, Source
    from tepo_megatron.tasks.data.tokenizer import Tokenizer
    from tepo_megatron.tasks.protocol import RewardResult
    from tepo_megatron.tasks.reward.recorded import RecordedGroup

app = typer.Typer()


@app.command("show")
def _show_command(
    run: RunOrSetting = None,
    overrides: Overrides = None,
    heldout: Annotated[bool, typer.Option("--heldout", help="The held-out problems.")] = False,
    source: Annotated[str | None, typer.Option("--source", metavar="NAME", help="Only this source.")] = None,
    left_out: Annotated[bool, typer.Option("--left-out", help="Show what is left out, and why.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="How many prompts of each source are shown.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Show each source's counts, and its first prompts as the model reads them: special tokens are ⟦names⟧.

    Reads tokenizer and problems; starts nothing.

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
    from tepo_megatron.tasks.data.problems import encode_prompt

    return tokenizer.show(encode_prompt(tokenizer, prompt.problem)) if prompt.tokens else prompt.problem.prompt


def _show(sources: Sequence[Source], rows: Sequence[dict[str, Any]], shares: dict[str, float]) -> None:
    columns = ["source", "share", "problems", "used", "left out", "tokens: least", "mean", "most"]
    summaries = [_summary(item, shares) for item in sources]
    show_table(columns, [_line(item) for item in summaries])
    for notice in (notice for item in sources for notice in item.notices):
        echo(notice)
    for row in rows:
        about = [f"{row['tokens']} tokens" if row["tokens"] else "", f"answer {row['answer']!r}", row["left_out"] or ""]
        echo(f"\n{row['id']}: {', '.join(item for item in about if item)}")
        echo("\n".join(f"  {line}" for line in row["prompt"].split("\n")))


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
def _prepare_command(
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
    """Make problems of published benchmarks from pinned, checked files, and a run's section to evaluate on them.

    [dim]tepo data prepare math500 aime24 aime25 --family qwen[/]

    [dim]tepo eval models/mine --run data/benchmarks/benchmarks.yaml[/]

    [dim]tepo data prepare gsm8k --from /shared/downloads/gsm8k[/]
    """
    with user_errors():
        from tepo_megatron.tasks.data.benchmarks import SETS, prepare

        done = []
        for name in names:
            done.append(prepare(name, to, source=source, family=family, accept_changed=accept_changed))
            if not as_json:
                one = done[-1]
                echo(f"{one.path}: {one.problems} problems of {one.source}")
                if one.recorded:
                    echo(f"  its SHA-256 was not known and is recorded from now on: {one.source_sha256}")
    if as_json:
        rows = [{**asdict(one), "path": str(one.path), "source": str(one.source)} for one in done]
        echo(json.dumps(rows, indent=2))
    else:
        echo(f"to evaluate on them: tepo eval MODEL_DIR --run {to / SETS}")


@app.command("benchmarks")
def _benchmarks_command(as_json: AsJson = False) -> None:
    """List the benchmarks that can be prepared, and where their files are."""
    from tepo_megatron.tasks.data.benchmarks import BENCHMARKS

    if as_json:
        shown = ("title", "repository", "revision", "file", "sha256", "problems")
        rows = {name: {field: getattr(item, field) for field in shown} for name, item in BENCHMARKS.items()}
        echo(json.dumps(rows, indent=2))
        return
    from rich.table import Table

    table = Table("name", "benchmark", "problems", "from", "digest")
    for name, item in BENCHMARKS.items():
        known = "known" if item.sha256 else "recorded at first"
        table.add_row(name, item.title, str(item.problems), f"{item.repository} {item.file}", known)
    show(table)


reward_app = typer.Typer()

_WIDEST = 60


@reward_app.command("try")
def _try_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A run's samples.jsonl, or JSON lines with responses.")],
    overrides: Overrides = None,
    run: Annotated[Path | None, typer.Option("--run", metavar="RUN.yaml", help="The run whose reward section counts.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many lines are scored, from the first.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="For tools.")] = False,
) -> None:
    """Score recorded responses: reward, components, time, and failures; exit code 1 if any failed.

    A line of FILE is one of a run's samples.jsonl, or an object with prompt, answer, and response or responses.

    [dim]tepo reward try out/tiny/samples.jsonl reward.verifier=rewards.py:my_reward[/]
    """
    with user_errors():
        config = load_config(run, overrides or ())
        from tepo_megatron.tasks.reward.recorded import read_recorded
        from tepo_megatron.tasks.reward.verifier_task import VerifierTask, reward_configs

        groups = read_recorded(file)[:limit]
        with VerifierTask(reward_configs(config.reward, config.data)) as task:
            items = [(problem, text) for problem, responses in groups for text in responses]
            results = task.score(items, [number for number, (_, responses) in enumerate(groups) for _ in responses])
    rows = _reward_rows(groups, results)
    summary = _reward_summary(config.reward.verifier, rows)
    if as_json:
        echo(json.dumps({**summary, "responses": rows}, ensure_ascii=False))
    else:
        _show_rewards(rows, summary)
    if summary["failed"]:
        raise typer.Exit(1)


def _reward_rows(groups: Sequence[RecordedGroup], results: Sequence[RewardResult]) -> list[dict[str, Any]]:
    texts = [(problem.id, text) for problem, responses in groups for text in responses]
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


def _reward_summary(verifier: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scored = [row for row in rows if row["error"] is None]
    names = list(dict.fromkeys(name for row in scored for name in row["components"]))
    return {
        "verifier": verifier,
        "mean": fmean(row["reward"] for row in scored) if scored else None,
        "components": {name: fmean(row["components"].get(name, 0.0) for row in scored) for name in names},
        "seconds": fmean(row["seconds"] for row in rows),
        "failed": len(rows) - len(scored),
    }


def _show_rewards(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
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
        echo(f"failed: {error}")
    echo(f"{summary['verifier']}: {len(rows)} responses, {summary['failed']} failed")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _short(text: str, most: int = _WIDEST) -> str:
    from rich.markup import escape

    line = " ".join(text.split())
    return escape(line if len(line) <= most else f"{line[: most - 1]}…")


environment_app = typer.Typer()


@environment_app.command("serve")
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
    outlive_readers()
    with user_errors():
        loaded = load_config(run, overrides or ())
        config = loaded.environment
        if config is None:
            raise ValueError(f"{run} has no section environment; there is nothing to serve")
        from tepo_megatron.tasks.environments.protocol import read_key
        from tepo_megatron.tasks.environments.service import EnvironmentService

        try:
            key = read_key(key_file, write=True)
            service = EnvironmentService(config, host=host, port=port, key=key, sampling=loaded.rollout.sampling)
        except OSError as error:
            raise ValueError(
                f"{host}:{port} cannot be listened on ({error.strerror}); give another --host or --port"
            ) from error
        for number in not_ignored((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
            signal.signal(number, lambda *_: service.stop())
        echo(f"{config.name} at {service.url}, key in {key_file}")
        if service.notice:
            echo(service.notice)
        service.serve()
