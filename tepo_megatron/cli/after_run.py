"""Commands that read output folders."""

from __future__ import annotations

import json
import pydoc
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tepo_megatron.cli.console import AsJson, print_json, show, user_errors
from tepo_megatron.runtime.files import parse_samples
from tepo_megatron.runtime.text import echo, printable

if TYPE_CHECKING:
    from rich.table import Table

    from tepo_megatron.tasks.evaluate.estimators import Interval
    from tepo_megatron.tasks.evaluate.results import SetComparison
    from tepo_megatron.tools.report.page import Written


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="Output folder of tepo eval.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Output folder of tepo eval for another model.")],
    as_json: AsJson = False,
) -> None:
    """Compare two evaluated models, problem by problem: how much better B is than A, with 95 % intervals.

    A star marks an interval that excludes 0.

    [dim]tepo eval base evaluate.sets.aime.path=aime.jsonl output=out/base[/]

    [dim]tepo eval out/mine/model evaluate.sets.aime.path=aime.jsonl output=out/mine[/]

    [dim]tepo compare out/base out/mine[/]
    """
    with user_errors():
        from tepo_megatron.tasks.evaluate.results import compare_results

        result = compare_results(first, second)
    if as_json:
        echo(json.dumps([asdict(item) for item in result], indent=2))
        return
    show(_table(first, second, result))
    for item in result:
        for line in _remarks(item):
            echo(f"  {item.name}: {line}")


def _table(first: Path, second: Path, result: Sequence[SetComparison]) -> Table:
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
    return table


def _remarks(item: SetComparison) -> list[str]:
    lines = [f"{item.problems} problems"]
    if item.left_out:
        lines[0] += f"; {item.left_out} left out, which only one of the two has, or which differ"
    lines += [f"{key} differs: {one} in A, {other} in B" for key, (one, other) in item.settings.items()]
    return lines


def _shown(value: Interval, sign: str = "") -> str:
    digits = ".3f" if max(abs(value.mean), abs(value.high)) < 10 else ".1f"
    return f"{value.mean:{sign}{digits}} [{value.low:{sign}{digits}}, {value.high:{sign}{digits}}]"


def plot(
    outputs: Annotated[list[Path], typer.Argument(metavar="OUT", help="Output folders of runs, or their metrics.jsonl.")],
    png: Annotated[Path | None, typer.Option("--png", help="Where to; default: OUT/curves.png or comparison.png.")] = None,
    title: Annotated[str | None, typer.Option("--title", help="Above the picture; default: the folders' names.")] = None,
) -> None:
    """Draw the curves of one or several runs in one picture.

    [dim]tepo plot out/tiny[/]

    [dim]tepo plot out/tepo out/grpo --png tepo-grpo.png[/]
    """
    from tepo_megatron.run.display.plots import plot_comparison, plot_curves

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
    echo(f"wrote {target}")


def _distinct_names(files: list[Path]) -> list[str]:
    folders = [file.resolve().parent for file in files]
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(file.parent) for file in files]


WATCH_S = 2.0


def status(
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Output folder of a run.")],
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every two seconds until the run ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a run does now, who waits for whom, and what went wrong; or how it ended.

    Reads only the output folder, on any machine that sees it.

    [dim]tepo status out/tiny --watch[/]
    """
    from tepo_megatron.run.output.status import run_status, status_record

    clears = watch and sys.stdout.isatty() and not as_json
    shown: list[str] = []
    with user_errors():
        while True:
            lines, goes_on = run_status(output)
            if as_json:
                lines = [json.dumps(status_record(output), ensure_ascii=False)]
            if clears:
                sys.stdout.write("\x1b[2J\x1b[H")
            if clears or lines != shown:
                echo("\n".join(lines))
            shown = lines
            if not watch or not goes_on:
                return
            time.sleep(WATCH_S)


def report(
    outputs: Annotated[
        list[Path],
        typer.Argument(metavar="OUT", help="Output folders of runs, or of a sweep."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page. Default: OUT/report.html; of several OUT report.html here."),
    ] = None,
    title: Annotated[str, typer.Option("--title", help="Above the page; default: the runs' names.")] = "",
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metrics", metavar="NAME", help="Only these, such as 'entropy/*'; may be given more than once."),
    ] = None,
    samples: Annotated[
        int,
        typer.Option("--samples", min=0, help="At most so many responses of each kind (held out, training, tokens)."),
    ] = 3000,
    size: Annotated[float, typer.Option("--size", min=0.5, help="Megabytes that the page may take, about.")] = 5.0,
    watch: Annotated[
        int | None,
        typer.Option(
            "--watch", min=2, metavar="SECONDS", help="Write it again and again until the runs end; an open page follows."
        ),
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

    [dim]tepo report out/tepo out/grpo -o compare.html[/]

    [dim]tepo report out/evidence-tiny --metrics 'accuracy/*' --metrics reward/mean --samples 300   # a sweep[/]
    """
    from tepo_megatron.tools.report.page import Options, write_report
    from tepo_megatron.tools.report.runs import runs_in

    single = len(outputs) == 1 and outputs[0].name != "metrics.jsonl"
    target = output or (outputs[0] if single else Path()) / "report.html"
    options = Options(title, tuple(metrics or ()), samples, size, refresh=watch or 0)
    notice = ""
    going: bool | None = None
    with user_errors():
        while watch and (missing := [path for path in outputs if not runs_in(path)]):
            if notice != (notice := f"waits for a run in {', '.join(map(str, missing))}"):
                echo(notice, err=True)
            time.sleep(watch)
        while True:
            written = write_report(outputs, target, options)
            if going != (going := written.goes_on) and not as_json:
                echo(_summary_of(written))
            if watch is None or not written.goes_on:
                break
            time.sleep(watch)
    if as_json:
        print_json({**asdict(written), "path": str(written.path)})


def _summary_of(written: Written) -> str:
    runs = "1 run" if written.runs == 1 else f"{written.runs} runs"
    going = ", which goes on" if written.goes_on else ""
    return f"wrote {written.path}: {runs}{going}, {written.samples} samples, {written.bytes / 1e6:.1f} MB"


Row = Mapping[str, Any]

HELDOUT, TRAIN = "samples.jsonl", "train_samples.jsonl"


def samples(
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="Output folder of a run, that of tepo eval, or the file itself.")
    ],
    step: Annotated[int | None, typer.Option("--step", min=0, help="Of this step; default: the newest that has some.")] = None,
    train: Annotated[bool, typer.Option("--train", help="Responses that were trained on (log.train_samples).")] = False,
    wrong: Annotated[bool, typer.Option("--wrong", help="Only problems with a response that is not correct.")] = False,
    problem: Annotated[str | None, typer.Option("--problem", metavar="ID", help="Only this problem, at every step.")] = None,
    of_set: Annotated[str | None, typer.Option("--set", metavar="NAME", help="Only of this evaluation set.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read the model's answers: prompt, expected answer, responses, their rewards, and failures.

    On a terminal one page at a time. evaluate.show sets how many problems are kept, log.train_samples how many of training.

    [dim]tepo samples out/tiny --wrong[/]

    [dim]tepo samples out/tiny --problem 37+58[/]

    [dim]tepo samples out/tiny --train --step 20[/]
    """
    with user_errors():
        path = _find_samples(output, train=train)
        rows = list(_chosen(_of_set(_read_samples(path), path, of_set), path, step=step, wrong=wrong, problem=problem))
    if as_json:
        echo(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        text = "\n\n".join(map(_text_of, rows))
        if sys.stdout.isatty():
            pydoc.pager(printable(text))
        else:
            echo(text)


def _find_samples(output: Path, *, train: bool) -> Path:
    if output.is_file():
        return output
    name = TRAIN if train else HELDOUT
    for path in (output / name, output / "eval" / name):
        if path.is_file():
            return path
    hint = (
        "set log.train_samples to have a run write responses that it trains on"
        if train
        else "a run writes it at its first evaluation (data.heldout, evaluate.every), and tepo eval at its end"
    )
    raise ValueError(f"{output} has no {name}; {hint}")


def _read_samples(path: Path) -> list[dict[str, Any]]:
    """Skips a cut-off last line. Raises ValueError with the number of an invalid line."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return list(parse_samples(path, lines[:-1]))


def _of_set(rows: list[dict[str, Any]], path: Path, name: str | None) -> list[dict[str, Any]]:
    known = dict.fromkeys(str(row["set"]) for row in rows if "set" in row)
    if name is not None and name not in known:
        raise ValueError(f"{path} has no set {name!r}; it has {', '.join(known) or 'none, only held-out problems'}")
    return [row for row in rows if name in (None, row.get("set"))]


def _chosen(
    rows: Sequence[dict[str, Any]], path: Path, *, step: int | None, wrong: bool, problem: str | None
) -> Iterator[dict[str, Any]]:
    """Raises ValueError, which lists the existing ones, if there is none."""
    steps = sorted({row.get("step", 0) for row in rows})
    if step is not None and step not in steps:
        raise ValueError(f"{path} has nothing of step {step}; it has the steps {', '.join(map(str, steps)) or '(none)'}")
    if problem is not None:
        result = [row for row in rows if row.get("problem") == problem and step in (None, row.get("step", 0))]
    else:
        newest = step if step is not None else (steps[-1] if steps else None)
        result = [row for row in rows if row.get("step", 0) == newest]
    if not result:
        known = list(dict.fromkeys(str(row.get("problem")) for row in rows))
        raise ValueError(
            f"{path} has no problem {problem!r}; it has {', '.join(known[:8])}" if known else f"{path} has no sample yet"
        )
    yield from (row for row in result if not wrong or not all(_is_correct(item) for _, item in _responses(row)))


def _responses(row: Row) -> list[tuple[str, Row]]:
    if "response" in row:
        return [("response", row)]
    greedy = [("greedy", row["greedy"])] if row.get("greedy") else []
    return [*greedy, *((f"sample {index}", item) for index, item in enumerate(row.get("sampled", []), start=1))]


def _is_correct(response: Row) -> bool:
    """As the evaluation judged; in training and older files, by a reward of 1."""
    return bool(response.get("correct", (response.get("reward") or 0) >= 1))


def _text_of(row: Row) -> str:
    head = f"── step {row['step']} · " if "step" in row else "── "
    head += f"{row['set']} · " if "set" in row else ""
    source = str(row.get("source") or "")
    head += (
        f"{source} · " if source and not str(row.get("problem")).startswith(source) else ""
    )  # an id may begin with the source
    parts = [f"{head}problem {row.get('problem')} · answer {row.get('answer')}", _block(row.get("prompt"))]
    for name, item in _responses(row):
        parts += [f"{name}: {_verdict(item)}", *_transcript(item)]
    return "\n".join(parts)


def _transcript(response: Row) -> list[str]:
    if "turns" not in response:
        return [_block(response.get("response"))]
    return [line for turn in response["turns"] for line in (f"  {turn['by']}:", _block(turn["text"]))]


def _verdict(response: Row) -> str:
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
