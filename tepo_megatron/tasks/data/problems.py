"""Loads problems and encodes their prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from tepo_megatron.config.data import BUILTIN, FieldsConfig, SourceConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.runtime.text import check_text
from tepo_megatron.tasks.data import addition, stack_machine
from tepo_megatron.tasks.data.rows import DataFiles, DataRow
from tepo_megatron.tasks.data.tokenizer import Tokenizer

_ABSENT = object()


def _guess_number(name: str, rounds: int) -> list[Problem]:
    return [
        Problem(id=f"{name} {turn}: {number}", prompt="guess 1-7?", answer=str(number))
        for turn in range(1, rounds + 1)
        for number in range(1, 8)
    ]


BUILTIN_TASKS: Mapping[str, Callable[[], list[Problem]]] = {
    "addition": addition.train_problems,
    "addition-heldout": addition.heldout_problems,
    "guess-number": partial(_guess_number, "game", 20),
    "guess-number-heldout": partial(_guess_number, "heldout", 4),
    "stack-machine": stack_machine.train_problems,
    "stack-machine-heldout": stack_machine.heldout_problems,
}


def load_problems(source: str | SourceConfig) -> list[Problem]:
    """Default columns are ``prompt``, ``answer`` and ``id``; others become ``metadata``. The default id is ``<file
    stem>:<line>``, after the source's name, if any. Raises ValueError, with file and line.
    """
    config = SourceConfig(path=source) if isinstance(source, str) else source
    if config.path.startswith(BUILTIN):
        return [_shaped(problem, config) for problem in _load_builtin(config.path.removeprefix(BUILTIN))]
    path = Path(config.path).expanduser()
    if not path.exists():
        hint = f"; did you mean {BUILTIN}{path}?" if str(path) in BUILTIN_TASKS else ""
        raise ValueError(f"the data file {path} does not exist{hint}")
    data = DataFiles.find(path, config.split)
    _check_columns(path, data.columns(), config)
    problems = list(_without_repeats(data, config))
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
        problem = replace(problem, prompt=_fill_template(config.template, columns, columns))
    identity = f"{config.name}/{problem.id}" if config.name else problem.id
    return _checked(replace(problem, id=identity, messages=_wrapped(problem.prompt, config)), config)


def _checked(problem: Problem, config: SourceConfig) -> Problem:
    for what in ("id", "prompt", "answer", "messages", "metadata"):
        check_text(getattr(problem, what), f"{what} of the problem")
    if config.special_tokens and problem.messages:
        raise ValueError("special_tokens = true is for plain prompts, and messages never have any; leave it out")
    return replace(problem, special_tokens=bool(config.special_tokens))


def _check_columns(path: Path, columns: list[str] | None, config: SourceConfig) -> None:
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


def _without_repeats(data: DataFiles, config: SourceConfig) -> Iterator[Problem]:
    place_of_id: dict[str, str] = {}
    for row in data.rows():
        try:
            problem = _checked(_problem(row, config), config)
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from error
        if problem.id in place_of_id:
            raise ValueError(
                f"{row.place}: the id {problem.id!r} was used before, in {place_of_id[problem.id]}; ids must differ"
            )
        place_of_id[problem.id] = row.place
        yield problem


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
    """(text, messages if the chat template is used, column that was read)."""
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
        prompt = _fill_template(config.template, columns, {} if prompt is _ABSENT else {"prompt": prompt})
        # Every column stays in the metadata, since the prompt shows it in another form.
        return prompt, _wrapped(prompt, config), None
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


def encode_prompt(tokenizer: Tokenizer, problem: Problem) -> tuple[int, ...]:
    """Raises ValueError for unknown characters, and for messages without a usable chat template."""
    special, unknown = problem.special_tokens, tokenizer.unk_id
    texts = [content for _, content in problem.messages] or [problem.prompt]
    try:
        if problem.messages:
            ids = tokenizer.chat_ids(problem.messages)
        else:
            ids = tokenizer.prompt_ids(problem.prompt, special_tokens=special)
        is_known = unknown is None or not any(unknown in tokenizer.encode(text, special_tokens=special) for text in texts)
    except ValueError as error:
        raise ValueError(f"the prompt of problem {problem.id!r} cannot be encoded: {error}") from error
    if not is_known:
        text = "".join(texts)
        characters = "".join(character for character in dict.fromkeys(text) if unknown in tokenizer.encode(character))
        raise ValueError(
            f"the prompt of problem {problem.id!r} has characters that the tokenizer does not know: {characters or text!r}; "
            "change the prompt, or use a model whose tokenizer knows them"
        )
    return tuple(ids)


_PLACE = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*(?:\.\w+)*)\}")

ROLES = ("system", "user", "assistant", "tool")


def _fill_template(template: str, columns: Mapping[str, Any], named: Mapping[str, Any]) -> str:
    """``{name}`` is a column or in ``named``; ``{a.b}`` is the key b of column a; ``{{`` is a brace. Raises ValueError for a
    missing or empty column.
    """

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        value = _get({**columns, **named}, name)
        if value is _ABSENT:
            raise ValueError(f"the template has {{{name}}}, and the keys are: {', '.join(columns) or 'none'}")
        if value is None or (isinstance(value, str) and not value.strip()):
            raise ValueError(f"{name!r} is empty, and the template has it")
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return _PLACE.sub(fill, template)


def read_messages(given: Any, column: str) -> tuple[tuple[str, str], ...]:
    """(role, content) pairs. Raises ValueError, also if the last message needs no answer."""
    if not isinstance(given, list) or not given:
        raise ValueError(f"{column!r} must be a list of messages, each with role and content, not {json.dumps(given)[:40]}")
    messages = tuple(_message(message, f"{column}[{index}]") for index, message in enumerate(given))
    if messages[-1][0] not in ("user", "tool"):
        raise ValueError(
            f"the last message of {column!r} is the {messages[-1][0]}'s, and the model is to answer a user's; leave it out, or "
            "give it as the answer"
        )
    return messages


def _message(given: Any, place: str) -> tuple[str, str]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{place} is no message with role and content, but {json.dumps(given)[:40]}")
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        raise ValueError(f"{place} has the role {json.dumps(role)[:40]}; a role is one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"the content of {place} must be text, not {json.dumps(content)[:40]}")
    more = [key for key, value in given.items() if key not in ("role", "content") and value is not None]
    if more:
        raise ValueError(f"{place} has {', '.join(more)} beside role and content, which prompts here do not take; leave it out")
    return str(role), content
