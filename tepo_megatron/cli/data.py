from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from tepo_megatron.cli.console import AsJson, Overrides, RunFile, RunOrSetting, load_config, print_json, show_table, split_run
from tepo_megatron.runtime.preemption import not_ignored
from tepo_megatron.runtime.text import echo, outlive_readers
from tepo_megatron.tasks.data.benchmarks import BENCHMARKS, SETS, prepare

if TYPE_CHECKING:
    from tepo_megatron.tasks.data.sources import Source
    from tepo_megatron.tasks.data.tokenizer import Tokenizer

app = typer.Typer()


@app.command("show")
def _show_command(
    run: RunOrSetting = None,
    overrides: Overrides = None,
    heldout: Annotated[bool, Option("--heldout", help="The held-out problems.")] = False,
    source: Annotated[str | None, Option(metavar="NAME", help="Only this source.")] = None,
    left_out: Annotated[bool, Option("--left-out", help="Show what is left out, and why.")] = False,
    limit: Annotated[int, Option(min=0, help="How many prompts of each source are shown.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Show each source's counts, and its first prompts as the model reads them: special tokens are ⟦names⟧.

    Reads tokenizer and problems; starts nothing.

    [dim]tepo data show model.path=models/mine data.train=train.parquet data.fields.prompt=question[/]
    """
    config = load_config(*split_run(run, overrides))
    config.require_data()
    from tepo_megatron.tasks.data import sources
    from tepo_megatron.tasks.data.builtin import resolve_model_path
    from tepo_megatron.tasks.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve_model_path(config.model.path), config.data.chat_template_kwargs)
    if heldout and config.data.heldout is None:
        raise ValueError("data.heldout is not given: there are no held-out problems to show")
    result = sources.Source.read_all(config.data, "heldout" if heldout else "train", tokenizer)
    if source is not None:
        known = ", ".join(item.name or item.path for item in result)
        result = [item for item in result if source in (item.name, item.path)]
        if not result:
            raise ValueError(f"there is no source {source}; the run has {known}")
    shares = {}
    if not heldout:
        plain, total = isinstance(config.data.train, str), sum(item.weight for item in config.data.train_sources)
        shares = {item.path if plain else item.called: item.weight / total for item in config.data.train_sources}
    rows = [row for item in result for row in _rows(item, tokenizer, limit, left_out=left_out)]
    summaries = [_summary(item, shares) for item in result]
    if as_json:
        print_json({"sources": summaries, "prompts": rows})
        return
    lines = []
    for item in summaries:
        share, tokens = "" if item["share"] is None else f"{item['share']:.3g}", item["tokens"]
        counts = [str(count) for count in (item["problems"], item["used"], item["problems"] - item["used"])]
        lines.append([item["source"], share, *counts, str(tokens["min"]), f"{tokens['mean']:.1f}", str(tokens["max"])])
    show_table(["source", "share", "problems", "used", "left out", "tokens: least", "mean", "most"], lines)
    for notice in (notice for item in result for notice in item.notices):
        echo(notice)
    for row in rows:
        about = [f"{row['tokens']} tokens" if row["tokens"] else "", f"answer {row['answer']!r}", row["left_out"] or ""]
        echo(f"\n{row['id']}: {', '.join(item for item in about if item)}")
        echo(indent(row["prompt"], "  ", lambda _line: True))


def _summary(source: Source, shares: Mapping[str, float]) -> dict[str, Any]:
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
    from tepo_megatron.tasks.data.problems import encode_prompt

    chosen = [prompt for prompt in source.prompts if (prompt.left_out is not None) == left_out]
    for prompt in chosen[:limit]:  # problems that a filter removes are not encoded
        problem = prompt.problem
        yield {
            "source": source.name or source.path,
            "id": problem.id,
            "prompt": tokenizer.show(encode_prompt(tokenizer, problem)) if prompt.tokens else problem.prompt,
            "tokens": prompt.tokens or None,
            "answer": problem.answer,
            "left_out": prompt.left_out,
        }


@app.command("prepare")
def _prepare_command(
    names: Annotated[list[str], Argument(metavar="NAME...", help="Such as math500: tepo data benchmarks lists them.")],
    to: Annotated[Path, Option(metavar="FOLDER", help="Where problems and digests are kept.")] = Path("data/benchmarks"),
    source: Annotated[
        Path | None,
        Option("--from", metavar="PATH", help="The published file, or a folder with it, where there is no network."),
    ] = None,
    family: Annotated[str | None, Option(help="Prompts for which models: plain, base, instruct, qwen or reasoning.")] = None,
    accept_changed: Annotated[bool, Option("--accept-changed", help="Take a file of another digest from now on.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make problems of published benchmarks from pinned, checked files, and a run's section to evaluate on them.

    [dim]tepo data prepare math500 aime24 aime25 --family qwen[/]

    [dim]tepo eval models/mine --run data/benchmarks/benchmarks.yaml[/]

    [dim]tepo data prepare gsm8k --from /shared/downloads/gsm8k[/]
    """
    rows = []
    for name in names:
        one = prepare(name, to, source=source, family=family, accept_changed=accept_changed)
        rows.append(asdict(one))
        if not as_json:
            echo(f"{one.path}: {one.problems} problems of {one.source}")
            if one.recorded:
                echo(f"  its SHA-256 was not known and is recorded from now on: {one.source_sha256}")
    if as_json:
        print_json(rows)
    else:
        echo(f"to evaluate on them: tepo eval MODEL_DIR --run {to / SETS}")


@app.command("benchmarks")
def _benchmarks_command(as_json: AsJson = False) -> None:
    """List the benchmarks that can be prepared, and where their files are."""
    if as_json:
        shown = ("title", "repository", "revision", "file", "sha256", "problems")
        print_json({name: {field: getattr(item, field) for field in shown} for name, item in BENCHMARKS.items()})
        return
    rows = []
    for name, item in BENCHMARKS.items():
        known = "known" if item.sha256 else "recorded at first"
        rows.append((name, item.title, str(item.problems), f"{item.repository} {item.file}", known))
    show_table(("name", "benchmark", "problems", "from", "digest"), rows)


reward_app = typer.Typer()


@reward_app.command("try")
def _try_command(
    file: Annotated[Path, Argument(metavar="FILE", help="A run's samples.jsonl, or JSON lines with responses.")],
    overrides: Overrides = None,
    run: Annotated[Path | None, Option(metavar="RUN.yaml", help="The run whose reward section counts.")] = None,
    limit: Annotated[int, Option(min=1, help="How many lines are scored, from the first.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Score recorded responses: reward, components, time, and failures; exit code 1 if any failed.

    A line of FILE is one of a run's samples.jsonl, or an object with prompt, answer, and response or responses.

    [dim]tepo reward try out/tiny/samples.jsonl reward.verifier=rewards.py:my_reward[/]
    """
    config = load_config(run, overrides or ())
    from tepo_megatron.tasks.reward.recorded import read_recorded
    from tepo_megatron.tasks.reward.verifier_task import VerifierTask

    groups = read_recorded(file)[:limit]
    with VerifierTask(config.reward, config.data) as task:
        items = [(problem, text) for problem, responses in groups for text in responses]
        results = task.score(items, [number for number, (_, responses) in enumerate(groups) for _ in responses])
    rows: list[dict[str, Any]] = [
        {
            "problem": problem.id,
            "response": str(text),
            "reward": result.reward,
            "components": dict(result.parts),
            "seconds": round(result.seconds, 6),
            "error": result.error,
        }
        for (problem, text), result in zip(items, results, strict=True)
    ]
    scored = [row for row in rows if row["error"] is None]
    names = list(dict.fromkeys(name for row in scored for name in row["components"]))
    summary: dict[str, Any] = {
        "verifier": config.reward.verifier,
        "mean": fmean(row["reward"] for row in scored) if scored else None,
        "components": {name: fmean(row["components"].get(name, 0.0) for row in scored) for name in names},
        "seconds": fmean(row["seconds"] for row in rows),
        "failed": len(rows) - len(scored),
    }
    if as_json:
        echo(json.dumps({**summary, "responses": rows}, ensure_ascii=False))
    else:
        _show_rewards(rows, summary)
    if summary["failed"]:
        raise typer.Exit(1)


def _show_rewards(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    names, mean = list(summary["components"]), {**summary, "reward": summary["mean"], "error": None}
    lines = [
        [
            "mean" if row is mean else f"{_short(row['problem'], 20)}  {_short(row['response'], 60)}",
            *(_figure(row["components"].get(name)) for name in names),
            "failed" if row["error"] else _figure(row["reward"]),
            f"{1000 * row['seconds']:.1f}",
        ]
        for row in (*rows, mean)
    ]
    show_table(["problem, response", *names, "reward", "ms"], lines)
    failures: dict[str, list[str]] = {}  # the first error names its problem
    for row in rows:
        if error := row["error"]:
            failures.setdefault(error.removeprefix(f"problem {row['problem']!r}: "), []).append(error)
    for errors in failures.values():
        others = f" (and {len(errors) - 1} other responses)" if len(errors) > 1 else ""
        echo(f"failed: {errors[0]}{others}")
    echo(f"{summary['verifier']}: {len(rows)} responses, {summary['failed']} failed")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _short(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


environment_app = typer.Typer()


@environment_app.command("serve")
def _serve(
    run: RunFile,
    overrides: Overrides = None,
    host: Annotated[str, Option(help="The address to listen on: of the nodes' inner network.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0: any free one, which is printed.")] = 8400,
    key_file: Annotated[Path, Option(help="The file with the key, written if it is not there; trainers need the same.")] = Path(
        "environment.key"
    ),
) -> None:
    """Run the environment of a configuration until Ctrl-C, for trainers that name it in environment.servers.

    [dim]tepo environment serve run.yaml --host 10.0.0.7 --key-file keys/environment[/]
    """
    outlive_readers()
    loaded = load_config(run, overrides or ())
    config = loaded.environment
    if config is None:
        raise ValueError(f"{run} has no section environment; there is nothing to serve")
    from tepo_megatron.tasks.environments.protocol import read_key
    from tepo_megatron.tasks.environments.service import EnvironmentService

    key = read_key(key_file, "--key-file", write=True)
    try:
        service = EnvironmentService(config, host=host, port=port, key=key, sampling=loaded.rollout.sampling)
    except OSError as error:
        raise ValueError(f"{host}:{port} cannot be listened on ({error.strerror}); give another --host or --port") from error
    for number in not_ignored((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        signal.signal(number, lambda *_: service.stop())
    echo(f"{config.name} at {service.url}, key in {key_file}")
    if service.notice:
        echo(service.notice)
    service.serve()
