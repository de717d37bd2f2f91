"""``tepo samples``: a model's answers, and reasons for their rewards."""

from __future__ import annotations

import json
import pydoc
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any

import typer

from tepo_megatron.cli.console import user_errors
from tepo_megatron.cli.options import AsJson
from tepo_megatron.runtime.files import parse_samples

Row = Mapping[str, Any]

HELDOUT, TRAIN = "samples.jsonl", "train_samples.jsonl"
"""A run's files of evaluations, and of training steps (``log.train_samples``)."""


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
    """Read what the model answered: prompt, expected answer, responses, their rewards, and what failed.

    On a terminal one page after the other. How many problems are kept is evaluate.show; of training, log.train_samples.

    [dim]tepo samples out/tiny --wrong[/]

    [dim]tepo samples out/tiny --problem 37+58[/]

    [dim]tepo samples out/tiny --train --step 20[/]
    """
    with user_errors():
        path = _find_samples(output, train=train)
        rows = list(chosen(_of_set(read_samples(path), path, of_set), path, step=step, wrong=wrong, problem=problem))
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        text = "\n\n".join(map(text_of, rows))
        if sys.stdout.isatty():
            pydoc.pager(text)
        else:
            typer.echo(text)


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


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Skips a cut-off last line. Raises ValueError with the number of an invalid line."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return list(parse_samples(path, lines[:-1]))


def _of_set(rows: list[dict[str, Any]], path: Path, name: str | None) -> list[dict[str, Any]]:
    known = dict.fromkeys(str(row["set"]) for row in rows if "set" in row)
    if name is not None and name not in known:
        raise ValueError(f"{path} has no set {name!r}; it has {', '.join(known) or 'none, only held-out problems'}")
    return [row for row in rows if name in (None, row.get("set"))]


def chosen(
    rows: Sequence[dict[str, Any]], path: Path, *, step: int | None, wrong: bool, problem: str | None
) -> Iterator[dict[str, Any]]:
    """Rows of one step or problem. Raises ValueError if there is none, and lists the existing ones."""
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
    yield from (row for row in result if not wrong or not all(_is_correct(item) for _, item in responses(row)))


def responses(row: Row) -> list[tuple[str, Row]]:
    """(name, response): greedy and samples of an evaluation, or a training step's one."""
    if "response" in row:
        return [("response", row)]
    greedy = [("greedy", row["greedy"])] if row.get("greedy") else []
    return [*greedy, *((f"sample {index}", item) for index, item in enumerate(row.get("sampled", []), start=1))]


def _is_correct(response: Row) -> bool:
    """As the evaluation judged; in training and older files, by a reward of 1."""
    return bool(response.get("correct", (response.get("reward") or 0) >= 1))


def text_of(row: Row) -> str:
    """A problem with its responses, for a terminal."""
    head = f"── step {row['step']} · " if "step" in row else "── "
    head += f"{row['set']} · " if "set" in row else ""
    source = str(row.get("source") or "")
    head += (
        f"{source} · " if source and not str(row.get("problem")).startswith(source) else ""
    )  # an id may begin with the source
    parts = [f"{head}problem {row.get('problem')} · answer {_safe(str(row.get('answer')))}", _block(row.get("prompt"))]
    for name, item in responses(row):
        parts += [f"{name}: {_verdict(item)}", *_transcript(item)]
    return "\n".join(parts)


def _transcript(response: Row) -> list[str]:
    if "turns" not in response:
        return [_block(response.get("response"))]
    return [line for turn in response["turns"] for line in (f"  {_safe(str(turn['by']))}:", _block(turn["text"]))]


def _verdict(response: Row) -> str:
    reward = response.get("reward")
    said = ["no reward" if reward is None else f"reward {reward:g}"]
    if response.get("components"):
        said[0] += f" ({', '.join(f'{name} {value:g}' for name, value in response['components'].items())})"
    if "correct" in response:
        said.append("correct" if response["correct"] else "wrong")
    own = f", {response['model_tokens']} of them the model's" if "model_tokens" in response else ""
    said.append(f"{response.get('tokens')} tokens{own}")
    if response.get("finish_reason") == "length":
        said.append("cut" if own else "cut at rollout.sampling.max_new_tokens")
    if response.get("error"):
        said.append(f"failed: {_safe(str(response['error']))}")
    return " · ".join(said)


def _block(text: object) -> str:
    return indent(_safe(str(text)), "    ", lambda _line: True)


def _safe(text: str) -> str:
    """Escape terminal commands in the model's text."""
    return "".join(item if item.isprintable() or item in "\n\t" else f"\\u{ord(item):04x}" for item in text)
