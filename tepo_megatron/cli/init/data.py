"""``tepo init``'s questions about problems: files, splits, columns, chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from tepo_megatron.core.problem import Problem
    from tepo_megatron.tasks.data.tokenizer import Tokenizer


NONE = "-"
"""Answers that there are no held-out problems."""

_EVALUATED = ("test", "validation", "valid", "dev", "eval")
"""Names of held-out splits, in order of preference."""


@dataclass(frozen=True)
class DataOptions:
    """The command's options; None is asked."""

    train: str | None
    heldout: str | None
    split: str | None
    heldout_split: str | None
    prompt: str | None
    answer: str | None
    chat_template: bool | None


@dataclass(frozen=True)
class _FoundData:
    section: dict[str, Any]
    train: list[Problem]
    heldout: list[Problem]


def ask_data(options: DataOptions, tokenizer: Tokenizer) -> _FoundData:
    """Ask for what ``options`` leaves open. Raises ValueError for unreadable problems."""
    what = "a file (JSON lines, JSON, CSV, Parquet), a folder of a data set, or builtin:addition"
    path = ask(f"Training problems: {what}", options.train, "--train", _path)
    split = _ask_split(path, options.split, "--split", default=None)
    fields = _ask_columns(path, split, options)
    train = _loaded(_source(path, split), fields)
    _say(train)
    held = _ask_heldout(options, path, split)
    heldout = [] if held is None else _loaded(held, fields)
    if held is not None:
        _say(heldout, also_trained_on=len({item.prompt for item in train} & {item.prompt for item in heldout}))
    section: dict[str, Any] = {"train": _source(path, split), "heldout": held}
    section |= {"fields": fields} if fields else {}
    if _ask_template(options.chat_template, tokenizer, [*train, *heldout]):
        section["chat_template"] = True
        train = _loaded(section["train"], fields, chat_template=True)
        heldout = [] if held is None else _loaded(held, fields, chat_template=True)
    return _FoundData(section, train, heldout)


def _path(answer: str) -> str:
    """Checks only existence and format; rows are read once their columns are known."""
    from tepo_megatron.tasks.data.problems import load_problems
    from tepo_megatron.tasks.data.rows import splits_of

    if answer.startswith("builtin:") or not Path(answer).expanduser().exists():
        load_problems(answer)  # raises with the reason
    else:
        splits_of(Path(answer).expanduser())
    return answer


def _ask_split(path: str, given: str | None, option: str, *, default: str | None) -> str | None:
    from tepo_megatron.tasks.data.rows import splits_of

    splits = [] if path.startswith("builtin:") else splits_of(Path(path).expanduser())
    if len(splits) < 2 and given is None:
        return None
    return ask(f"Split of {path} ({', '.join(splits)})", given, option, _one_of(splits, f"split of {path}"), default=default)


def _ask_columns(path: str, split: str | None, options: DataOptions) -> dict[str, str]:
    from tepo_megatron.tasks.data.rows import first_columns

    columns = [] if path.startswith("builtin:") else first_columns(Path(path).expanduser(), split)
    result = {}
    for field, given, usual in (
        ("prompt", options.prompt, {"prompt", "messages"}),
        ("answer", options.answer, {"answer"}),
    ):
        if given is not None or (columns and not usual & set(columns)):
            question = f"Which column is the {field} ({', '.join(columns)})"
            result[field] = ask(question, given, f"--{field}-column", _one_of(columns, f"column of {path}"))
    return {field: column for field, column in result.items() if column != field}


def _ask_heldout(options: DataOptions, train: str, split: str | None) -> str | list[dict[str, str]] | None:
    """Proposes another split if the training problems are a split."""
    from tepo_megatron.tasks.data.rows import splits_of

    others = [] if split is None else [item for item in splits_of(Path(train).expanduser()) if item != split]
    proposed = next((name for name in _EVALUATED if name in others), others[0] if others else None)

    def check(answer: str) -> str:
        if answer == train and split is None:
            raise ValueError(f"{answer} is trained on; give other problems, or {NONE} for none")
        return answer if answer == NONE else _path(answer)

    question = f"Held-out problems to evaluate on ({NONE}: none)"
    path = ask(question, options.heldout, "--heldout", check, default=train if others else NONE)
    if path == NONE:
        return None
    chosen = _ask_split(path, options.heldout_split, "--heldout-split", default=proposed if path == train else None)
    if path == train and chosen == split:
        raise ValueError(f"the split {split} of {path} is trained on; hold another one out")
    return _source(path, chosen)


def _ask_template(given: bool | None, tokenizer: Tokenizer, problems: Sequence[Problem]) -> bool:
    plain = next((problem for problem in problems if not problem.messages), None)
    if plain is None:
        return False
    if given is None:
        try:
            tokenizer.chat_ids((("user", plain.prompt),))
        except ValueError:
            return False
    question = "The tokenizer has a chat template: is each prompt a user's message in it (yes, no)"
    option = None if given is None else "yes" if given else "no"
    answer = ask(question, option, "--chat-template", _one_of(["yes", "no", "y", "n"], "answer"), default="yes")
    return answer.startswith("y")


def _one_of(known: Sequence[str], what: str) -> Callable[[str], str]:
    """A column may be a key within one, ``a.b``."""

    def check(answer: str) -> str:
        if answer not in known and answer.partition(".")[0] not in known:
            raise ValueError(f"{answer!r} is no {what}; {', '.join(known) or 'there is none'}")
        return answer

    return check


def _source(path: str, split: str | None) -> str | list[dict[str, str]]:
    return path if split is None else [{"path": path, "split": split}]


def _loaded(source: str | list[dict[str, str]], fields: dict[str, str], *, chat_template: bool = False) -> list[Problem]:
    from tepo_megatron.config import DataConfig
    from tepo_megatron.tasks.data.problems import load_problems

    data = DataConfig.model_validate({"train": source, "fields": fields, "chat_template": chat_template})
    return [problem for item in data.train_sources for problem in load_problems(item)]


def _say(problems: Sequence[Problem], *, also_trained_on: int = 0) -> None:
    first = problems[0]
    typer.echo(f"  {len(problems)} problems; the first: {first.prompt[:80]!r}, answer {first.answer[:40]!r}")
    if also_trained_on:
        typer.echo(f"  warning: {also_trained_on} of their prompts are trained on, too", err=True)


T = TypeVar("T")


def ask(question: str, given: object, option: str, check: Callable[[str], T], *, default: str | None = None) -> T:
    """The checked option, or an answer, asked until valid. If nobody answers: the default, or ValueError."""
    if given is not None:
        return check(str(given))
    while True:
        try:
            answer = typer.prompt(question, default=default)
        except typer.Abort:
            if default is None:
                raise ValueError(f"{option} is not given, and nobody answers; give it") from None
            return check(default)
        try:
            return check(answer)
        except ValueError as error:
            typer.echo(f"  {error}", err=True)
