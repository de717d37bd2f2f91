from __future__ import annotations

import json
import math
import pydoc
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from tepo_megatron.cli.console import AsJson, print_json, show
from tepo_megatron.runtime.files import parse_samples
from tepo_megatron.runtime.text import echo, printable

if TYPE_CHECKING:
    from tepo_megatron.tasks.evaluate.estimators import Interval

_Row = Mapping[str, Any]

app = typer.Typer()

_WATCH_S = 2.0


@app.command("compare")
def _compare(
    first: Annotated[Path, Argument(metavar="A", help="Output folder of tepo eval.")],
    second: Annotated[Path, Argument(metavar="B", help="Output folder of tepo eval for another model.")],
    as_json: AsJson = False,
) -> None:
    """Compare two evaluated models, problem by problem: how much better B is than A, with 95 % intervals.

    A star marks an interval of six or more problems that excludes 0.

    [dim]tepo eval base evaluate.sets.aime.path=aime.jsonl output=out/base[/]

    [dim]tepo eval out/mine/model evaluate.sets.aime.path=aime.jsonl output=out/mine[/]

    [dim]tepo compare out/base out/mine[/]
    """
    from tepo_megatron.tasks.evaluate.results import compare_results

    result = compare_results(first, second)
    if as_json:
        print_json([asdict(item) for item in result])
        return
    from rich.markup import escape
    from rich.table import Table

    folders = (f"A: {escape(str(first))}", f"B: {escape(str(second))}")
    table = Table("set", "", *folders, "B − A", title="Means and 95 % intervals", title_justify="left")
    for item in result:
        for index, (name, figure) in enumerate(item.figures.items()):
            star = " *" if figure.difference.excludes_zero else ""
            row = [_shown(figure.first), _shown(figure.second), _shown(figure.difference, "+") + star]
            table.add_row(escape(item.name) if index == 0 else "", escape(name), *row)
        table.add_section()
    show(table)
    for item in result:
        left_out = f"; {item.left_out} left out, which only one of the two has, or which differ" if item.left_out else ""
        echo(f"  {item.name}: {item.problems} problems{left_out}")
        for key, (one, other) in item.settings.items():
            echo(f"  {item.name}: {key} differs: {one} in A, {other} in B")


def _shown(value: Interval, sign: str = "") -> str:
    digits = ".3f" if max(abs(value.mean), abs(value.high)) < 10 else ".1f"
    return f"{value.mean:{sign}{digits}} [{value.low:{sign}{digits}}, {value.high:{sign}{digits}}]"


@app.command("plot")
def _plot(
    outputs: Annotated[list[Path], Argument(metavar="OUT", help="Output folders of runs, or their metrics.jsonl.")],
    png: Annotated[Path | None, Option(help="Where to; default: OUT/curves.png or comparison.png.")] = None,
    title: Annotated[str | None, Option(help="Above the picture; default: the folders' names.")] = None,
) -> None:
    """Draw the curves of one or several runs in one picture.

    [dim]tepo plot out/tepo out/grpo --png tepo-grpo.png[/]
    """
    files = [path / "metrics.jsonl" if path.is_dir() else path for path in outputs]
    from tepo_megatron.run.display.plots import plot_comparison, plot_curves

    for path, file in zip(outputs, files, strict=True):
        if not file.is_file():
            raise ValueError(f"{path} has no metrics.jsonl; give the output folder of a run")
    names = [file.resolve().parent.name for file in files]
    if len(set(names)) < len(names):
        names = [str(file.parent) for file in files]
    if len(files) == 1:
        target = png or files[0].with_name("curves.png")
        plot_curves(files[0], target, title or names[0])
    else:
        target = png or Path("comparison.png")
        plot_comparison(dict(zip(names, files, strict=True)), target, title or " · ".join(names))
    echo(f"wrote {target}")


@app.command("status")
def _status(
    output: Annotated[Path, Argument(metavar="OUT", help="Output folder of a run.")],
    watch: Annotated[bool, Option("--watch", help="Show it again every two seconds until the run ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a run does now, who waits for whom, and what went wrong; or how it ended.

    Reads only the output folder, on any machine that sees it.

    [dim]tepo status out/tiny --watch[/]
    """
    from tepo_megatron.run.output.status import run_status, status_record

    clears = watch and sys.stdout.isatty() and not as_json
    shown: list[str] = []
    while True:
        if as_json:
            record = status_record(output)
            lines, goes_on = [json.dumps(record, ensure_ascii=False)], record["runs"]
        else:
            lines, goes_on = run_status(output)
        if clears:
            sys.stdout.write("\x1b[2J\x1b[H")
        if clears or lines != shown:
            echo("\n".join(lines))
        shown = lines
        if not watch or not goes_on:
            return
        time.sleep(_WATCH_S)


@app.command("report")
def _report(
    outputs: Annotated[list[Path], Argument(metavar="OUT", help="Output folders of runs, or of a sweep.")],
    output: Annotated[
        Path | None, Option("--output", "-o", help="The page. Default: OUT/report.html; of several OUT report.html here.")
    ] = None,
    title: Annotated[str, Option(help="Above the page; default: the runs' names.")] = "",
    metrics: Annotated[
        list[str] | None, Option(metavar="NAME", help="Only these, such as 'entropy/*'; may be given more than once.")
    ] = None,
    samples: Annotated[int, Option(min=0, help="At most so many responses of each kind (held out, training, tokens).")] = 3000,
    size: Annotated[float, Option(min=0.5, help="Megabytes of samples, about. Curves (--metrics) come on top.")] = 5.0,
    watch: Annotated[
        int | None, Option(min=2, metavar="SECONDS", help="Write it again and again until the runs end; an open page follows.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file to look at runs in a browser: nothing to install, nothing loaded from a network.

    Shows runs side by side: curves, where the time went, settings that differ, faults and restarts; and samples, token by
    token where a run records them (log.token_samples=8). Runs that differ only in their seed are drawn together, as mean and
    range, and kinds are compared seed by seed, with intervals. Works while the runs continue, on any machine that sees their
    folders.

    [dim]tepo report out/tiny[/]

    [dim]tepo report out/tiny --watch 30                      # while it trains; open out/tiny/report.html[/]

    [dim]tepo report out/evidence-tiny --metrics 'accuracy/*' --metrics reward/mean --samples 300   # a sweep[/]
    """
    from tepo_megatron.tools.report import write_report
    from tepo_megatron.tools.report.runs import Run

    single = len(outputs) == 1 and outputs[0].name != "metrics.jsonl"
    target = output or (outputs[0] if single else Path()) / "report.html"
    options: dict[str, Any] = {"title": title, "metrics": metrics or (), "most_samples": samples, "megabytes": size}
    notice = ""
    going: bool | None = None
    while watch and (missing := [path for path in outputs if not Run.folders_in(path)]):
        if notice != (notice := f"waits for a run in {', '.join(map(str, missing))}"):
            echo(notice, err=True)
        time.sleep(watch)
    while True:
        written = write_report(outputs, target, **options, refresh=watch or 0)
        if going != (going := written.goes_on) and not as_json:
            runs = "1 run" if written.runs == 1 else f"{written.runs} runs"
            about = f"{runs}{', which goes on' if going else ''}, {written.samples} samples, {written.bytes / 1e6:.1f} MB"
            echo(f"wrote {written.path}: {about}")
        if watch is None or not written.goes_on:
            break
        time.sleep(watch)
    if as_json:
        print_json({**asdict(written), "path": str(written.path)})


@app.command("samples")
def _samples(
    output: Annotated[Path, Argument(metavar="OUT", help="Output folder of a run, that of tepo eval, or the file itself.")],
    step: Annotated[int | None, Option(min=0, help="Of this step; default: the newest that has some.")] = None,
    train: Annotated[bool, Option("--train", help="Responses that were trained on (log.train_samples).")] = False,
    wrong: Annotated[bool, Option("--wrong", help="Only problems with a response that is not correct.")] = False,
    problem: Annotated[str | None, Option(metavar="ID", help="Only this problem, at every step.")] = None,
    of_set: Annotated[str | None, Option("--set", metavar="NAME", help="Only of this evaluation set.")] = None,
    limit: Annotated[int | None, Option(min=1, help="At most so many problems.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read the model's answers: prompt, expected answer, responses, their rewards, and failures.

    On a terminal one page at a time. evaluate.show sets how many problems are kept, log.train_samples how many of training.

    [dim]tepo samples out/tiny --wrong[/]

    [dim]tepo samples out/tiny --problem 37+58[/]

    [dim]tepo samples out/tiny --train --step 20[/]
    """
    path = _find_samples(output, train=train)
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        matching = parse_samples(path, (line for line in file if line.endswith("\n")))  # a cut-off last line is skipped
        for key, value in (("set", of_set), ("step", step), ("problem", problem)):
            matching = matching if value is None else _that_have(matching, path, key, value)
        rows = _of_newest_step(matching) if problem is None else list(matching)
    if not rows:
        raise ValueError(f"{path} has no sample yet")
    rows = [row for row in rows if not wrong or not all(_is_correct(item) for _, item in _responses(row))][:limit]
    if as_json:
        print_json(rows)
    elif sys.stdout.isatty():
        pydoc.pager(printable("\n\n".join(map(_text_of, rows))))
    else:
        echo("\n\n".join(map(_text_of, rows)))


def _find_samples(output: Path, *, train: bool) -> Path:
    name = "train_samples.jsonl" if train else "samples.jsonl"
    for path in (output, output / name, output / "eval" / name):
        if path.is_file():
            return path
    hint = "a run writes it at its first evaluation (data.heldout, evaluate.every), and tepo eval at its end"
    if train:
        hint = "set log.train_samples to have a run write responses that it trains on"
    raise ValueError(f"{output} has no {name}; {hint}")


def _of_newest_step(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    newest, result = -math.inf, list[dict[str, Any]]()  # memory may have no room for all of a long run's rows
    for row in rows:
        step = row.get("step", 0)
        if step > newest:
            newest, result = step, []
        if step == newest:
            result.append(row)
    return result


def _that_have(rows: Iterable[dict[str, Any]], path: Path, key: str, value: object) -> Iterator[dict[str, Any]]:
    """Raises ValueError at the end if there is none."""
    usual, has_any, known = {"step": 0}, False, dict[str, None]()
    for row in rows:
        if row.get(key, usual.get(key)) == value:
            has_any = True
            yield row
        elif len(known) < 8:
            known[str(row.get(key, usual.get(key, "")))] = None
    if not has_any:
        raise ValueError(f"{path} has no {key} {value!r}; it has {', '.join(known).strip(', ') or 'none'}")


def _responses(row: _Row) -> list[tuple[str, _Row]]:
    if "response" in row:
        return [("response", row)]
    greedy = [("greedy", row["greedy"])] if row.get("greedy") else []
    return [*greedy, *((f"sample {index}", item) for index, item in enumerate(row.get("sampled", []), start=1))]


def _is_correct(response: _Row) -> bool:
    """Training and older files have only the reward."""
    return bool(response.get("correct", (response.get("reward") or 0) >= 1))


def _text_of(row: _Row) -> str:
    source, problem = str(row.get("source") or ""), str(row.get("problem"))
    about = [
        *([f"step {row['step']}"] if "step" in row else []),
        *([row["set"]] if "set" in row else []),
        *([source] if source and not problem.startswith(source) else []),  # an id may begin with the source
        f"problem {problem}",
        f"answer {row.get('answer')}",
    ]
    parts = [f"── {' · '.join(about)}", _block(row.get("prompt"))]
    for name, item in _responses(row):
        parts.append(f"{name}: {_verdict(item)}")
        if "turns" in item:
            parts += [line for turn in item["turns"] for line in (f"  {turn['by']}:", _block(turn["text"]))]
        else:
            parts.append(_block(item.get("response")))
    return "\n".join(parts)


def _verdict(response: _Row) -> str:
    reward = response.get("reward")
    parts = ["no reward" if reward is None else f"reward {reward:g}"]
    if response.get("components"):
        parts[0] += f" ({', '.join(f'{name} {value:g}' for name, value in response['components'].items())})"
    if "correct" in response:
        parts.append("correct" if response["correct"] else "wrong")
    model_tokens = f", {response['model_tokens']} of them the model's" if "model_tokens" in response else ""
    parts.append(f"{response.get('tokens')} tokens{model_tokens}")
    if response.get("finish_reason") == "length":
        parts.append("cut" if model_tokens else "cut at rollout.sampling.max_new_tokens")
    if response.get("error"):
        parts.append(f"failed: {response['error']}")
    return " · ".join(parts)


def _block(text: object) -> str:
    return indent(str(text), "    ", lambda _line: True)
