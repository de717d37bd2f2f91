"""Loads problems from built-in tasks, files and folders."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tepo_megatron.config.data import BUILTIN, FieldsConfig, SourceConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.prompts import fill_template, read_messages
from tepo_megatron.tasks.data.rows import DataRow, columns_of, read_rows
from tepo_megatron.tasks.data.tasks import BUILTIN_TASKS

_ABSENT = object()


def load_problems(source: str | SourceConfig) -> list[Problem]:
    """A row has ``prompt`` (text or messages), ``answer`` (text or a number, as written) and optionally ``id``, or the columns
    that ``source`` maps to these; other columns become ``metadata``. The default id is ``<file stem>:<line>``, after the
    source's name, if any.

    Raises ValueError, with file and line: an unknown built-in task, a missing, damaged or empty file, a missing column, or a
    line that is no problem.
    """
    config = SourceConfig(path=source) if isinstance(source, str) else source
    if config.path.startswith(BUILTIN):
        return [_shaped(problem, config) for problem in _load_builtin(config.path.removeprefix(BUILTIN))]
    path = Path(config.path).expanduser()
    if not path.exists():
        hint = f"; did you mean {BUILTIN}{path}?" if str(path) in BUILTIN_TASKS else ""
        raise ValueError(f"the data file {path} does not exist{hint}")
    _check_columns(path, config)
    problems = list(_without_repeats(path, config))
    if not problems:
        raise ValueError(f"the data file {path} has no problem in it; write one JSON object with prompt and answer per line")
    return problems


def _load_builtin(name: str) -> list[Problem]:
    if name not in BUILTIN_TASKS:
        known = ", ".join(BUILTIN + task for task in sorted(BUILTIN_TASKS))
        nearest = get_close_matches(name, BUILTIN_TASKS, n=1)
        hint = f"; did you mean {BUILTIN}{nearest[0]}?" if nearest else ""
        raise ValueError(f"unknown built-in task {BUILTIN + name!r}; known: {known}{hint}")
    return BUILTIN_TASKS[name]()


def _shaped(problem: Problem, config: SourceConfig) -> Problem:
    if config.template is not None:
        columns = {"prompt": problem.prompt, "answer": problem.answer, "id": problem.id, **problem.metadata}
        problem = replace(problem, prompt=fill_template(config.template, columns, columns))
    identity = f"{config.name}/{problem.id}" if config.name else problem.id
    return replace(problem, id=identity, messages=_wrapped(problem.prompt, config))


def _check_columns(path: Path, config: SourceConfig) -> None:
    columns = columns_of(path, config.split)
    if columns is None:
        return
    fields = config.fields or FieldsConfig()
    needed = {"answer": fields.answer}
    if fields.messages is not None:
        needed["messages"] = fields.messages
    elif config.template is None and not (fields.prompt == "prompt" and "messages" in columns):
        needed["prompt"] = fields.prompt
    for field, column in needed.items():
        if column not in columns and column.partition(".")[0] not in columns:
            raise ValueError(
                f"{path} has no column {column!r}, which fields.{field} names; its columns are: {', '.join(columns)}. Say "
                f"which one it is, such as data.fields.{field}={_likely(field, columns)}"
            )


def _without_repeats(path: Path, config: SourceConfig) -> Iterator[Problem]:
    place_of_id: dict[str, str] = {}
    for row in read_rows(path, config.split):
        try:
            problem = _problem(row, config)
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from error
        if problem.id in place_of_id:
            raise ValueError(
                f"{row.place}: the id {problem.id!r} was used before, in {place_of_id[problem.id]}; ids must differ"
            )
        place_of_id[problem.id] = _line(row.place)
        yield problem


def _line(place: str) -> str:
    _, comma, row = place.rpartition(", ")
    return row if comma and row.startswith("row ") else f"line {place.rpartition(':')[2]}"


def _problem(row: DataRow, config: SourceConfig) -> Problem:
    fields, columns = config.fields or FieldsConfig(), row.written
    name = config.name
    if _get(columns, fields.id) not in (None, _ABSENT):
        identity = _text(columns, fields.id, "id")
        identity = f"{name}/{identity}" if name else identity
    else:
        identity = f"{name}:{row.name.rpartition(':')[2]}" if name else row.name
    prompt, messages, used = _read_prompt(columns, config, fields)
    answer = _text(columns, fields.answer, "answer")
    others = columns.keys() - {used, fields.answer, fields.id}
    values = row.values() if others else {}
    metadata = {key: values[key] for key in columns if key in others}
    return Problem(identity, prompt, answer, metadata, messages)


def _read_prompt(
    columns: Mapping[str, Any], config: SourceConfig, fields: FieldsConfig
) -> tuple[str, tuple[tuple[str, str], ...], str | None]:
    """The messages are empty unless the chat template is used; the last is the column that was read."""
    column = _messages_column(columns, fields)
    if column is not None:
        if config.template is not None:
            raise ValueError(f"a template is for prompts that are text, and {column!r} has messages; leave the template out")
        messages = read_messages(_get(columns, column), column)
        if config.system_prompt and messages[0][0] != "system":
            messages = (("system", config.system_prompt), *messages)
        return messages[-1][1], messages, column
    if config.template is not None:
        prompt = _get(columns, fields.prompt)
        prompt = fill_template(config.template, columns, {} if prompt is _ABSENT else {"prompt": prompt})
        return (
            prompt,
            _wrapped(prompt, config),
            None,
        )  # every column stays in the metadata, since the prompt shows it in another form
    prompt = _text(columns, fields.prompt, "prompt")
    return prompt, _wrapped(prompt, config), fields.prompt


def _messages_column(columns: Mapping[str, Any], fields: FieldsConfig) -> str | None:
    if fields.messages is not None:
        if _get(columns, fields.messages) in (None, _ABSENT):
            raise ValueError(f"{fields.messages!r} is missing (the keys are: {', '.join(columns) or 'none'})")
        return fields.messages
    prompt = _get(columns, fields.prompt)
    if isinstance(prompt, list) and prompt and all(isinstance(item, Mapping) for item in prompt):
        return fields.prompt
    return "messages" if prompt in (None, _ABSENT) and isinstance(columns.get("messages"), list) else None


def _wrapped(prompt: str, config: SourceConfig) -> tuple[tuple[str, str], ...]:
    if not config.chat_template:
        if config.system_prompt:
            raise ValueError(
                "a system_prompt is given, and a plain prompt has no place for it; set chat_template = true, or leave it out"
            )
        return ()
    system = (("system", config.system_prompt),) if config.system_prompt else ()
    return (*system, ("user", prompt))


def _get(columns: Mapping[str, Any], name: str) -> Any:
    if name in columns:
        return columns[name]
    value: Any = columns
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _likely(field: str, columns: Sequence[str]) -> str:
    return columns[-1 if field == "answer" else 0]


def _text(columns: Mapping[str, Any], name: str, field: str) -> str:
    value = _get(columns, name)
    if value is None or value is _ABSENT:
        keys = list(columns)
        hint = f"; if another key has it, say which one, such as data.fields.{field}={_likely(field, keys)}" if keys else ""
        raise ValueError(f"{name!r} is missing (the keys are: {', '.join(keys) or 'none'}){hint}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)  # the file has numbers as numbers
    if not isinstance(value, str):
        raise ValueError(f"{name!r} must be text, not {json.dumps(value)[:40]}")
    if not value.strip():
        raise ValueError(f"{name!r} is empty")
    return value
