import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from tepo_megatron.config.data import BUILTIN, SourceConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.runtime.hub import HUB, hub_folder
from tepo_megatron.runtime.text import check_text
from tepo_megatron.runtime.user_code import unknown
from tepo_megatron.tasks.data.rows import DataFiles, DataRow
from tepo_megatron.tasks.data.stack_machine import NUM_HELDOUT, problems_with_trees
from tepo_megatron.tasks.data.tokenizer import Tokenizer

_HELDOUT_SUMS = 200
_LONG_SUMS = 10_000


@cache
def _sums() -> list[Problem]:
    """``37+58=`` is answered ``7+8=15 3+5+1=9 95``, with a carry of 0 too. Sorted by digest, as random generators may change
    between versions: any first n are a fair sample.
    """
    sums = (Problem(id=f"{a}+{b}", prompt=f"{a}+{b}=", answer=str(a + b)) for a in range(10, 100) for b in range(10, 100))
    return sorted(sums, key=lambda problem: sha256(problem.id.encode()).digest())


@cache
def _long_sums() -> list[Problem]:
    """Four numbers of three digits, ``321+454+887+609=``, drawn by digests, so that they are the same everywhere. The written
    solution adds one number after the other, digit by digit (``examples/tiny/make_warm_start.py``).
    """
    sums: dict[str, Problem] = {}
    numbers = count()
    while len(sums) < _HELDOUT_SUMS + _LONG_SUMS:
        digest = sha256(f"long addition {next(numbers)}".encode()).digest()
        terms = [100 + int.from_bytes(digest[4 * index : 4 * index + 4]) % 900 for index in range(4)]
        text = "+".join(map(str, terms))
        sums[text] = Problem(id=text, prompt=f"{text}=", answer=str(sum(terms)))
    return list(sums.values())


def _guess_number(name: str, rounds: int) -> list[Problem]:
    return [
        Problem(id=f"{name} {turn}: {number}", prompt="guess 1-7?", answer=str(number))
        for turn in range(1, rounds + 1)
        for number in range(1, 8)
    ]


_BUILTIN_TASKS: Mapping[str, Callable[[], list[Problem]]] = {
    "addition": lambda: _sums()[_HELDOUT_SUMS:],
    "addition-heldout": lambda: _sums()[:_HELDOUT_SUMS],
    "long-addition": lambda: _long_sums()[_HELDOUT_SUMS:],
    "long-addition-heldout": lambda: _long_sums()[:_HELDOUT_SUMS],
    "guess-number": partial(_guess_number, "game", 20),
    "guess-number-heldout": partial(_guess_number, "heldout", 4),
    "stack-machine": lambda: [problem for problem, _ in problems_with_trees()[NUM_HELDOUT:]],
    "stack-machine-heldout": lambda: [problem for problem, _ in problems_with_trees()[:NUM_HELDOUT]],
}


def load_problems(source: str | SourceConfig) -> list[Problem]:
    """Default columns are ``prompt``, ``answer`` and ``id``; others become ``metadata``. The default id is ``<file
    stem>:<line>``, after any source name. Raises ValueError, with file and line.
    """
    config = SourceConfig(path=source) if isinstance(source, str) else source
    problems: list[Problem] = []
    place_of_id: dict[str, str] = {}
    for row in _rows(config):
        try:
            problem = _problem(row, config)
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from error
        if problem.id in place_of_id:
            raise ValueError(
                f"{row.place}: the id {problem.id!r} was used before, in {place_of_id[problem.id]}; ids must differ"
            )
        place_of_id[problem.id] = row.place
        problems.append(problem)
    if not problems:
        raise ValueError(
            f"the data file {config.path} has no problem in it; write one JSON object with prompt and answer per line"
        )
    return problems


def _rows(config: SourceConfig) -> Iterator[DataRow]:
    if config.path.startswith(BUILTIN):
        name = config.path.removeprefix(BUILTIN)
        if name not in _BUILTIN_TASKS:
            raise unknown("built-in task", name, sorted(_BUILTIN_TASKS), prefix=BUILTIN)
        for problem in _BUILTIN_TASKS[name]():
            columns = {"id": problem.id, "prompt": problem.prompt, "answer": problem.answer, **problem.metadata}
            yield DataRow(config.path, problem.id, columns)
        return
    from_hub = config.path.startswith(HUB)
    path = hub_folder(config.path, "dataset") if from_hub else Path(config.path).expanduser()
    if not path.exists():
        near = "a data set of the Hugging Face hub is hub:ORGANISATION/NAME, or hub:ORGANISATION/NAME/FOLDER"
        if str(path) in _BUILTIN_TASKS:
            near = f"did you mean {BUILTIN}{path}?"
        raise ValueError(f"the data file {path} does not exist; {near}")
    yield from DataFiles.find(path, config.split).rows()


def _problem(row: DataRow, config: SourceConfig) -> Problem:
    fields, columns, name = config.columns, row.written, config.name
    if _get(columns, fields.id) is not None:
        identity = _text(columns, config, "id")
        identity = f"{name}/{identity}" if name else identity
    else:
        number = row.name.rpartition(":")[2]
        identity = f"{name}{row.file and '/'}{row.file}:{number}" if name else row.name
    prompt, messages, used = _read_prompt(row, config)
    answer = _text(columns, config, "answer")
    others = columns.keys() - {used, fields.answer, fields.id}
    values = row.values() if others else {}
    metadata = {key: values[key] for key in columns if key in others}
    if config.special_tokens and messages:
        raise ValueError("special_tokens = true is for plain prompts, and messages never have any; leave it out")
    problem = Problem(identity, prompt, answer, metadata, messages, special_tokens=bool(config.special_tokens))
    for what in ("id", "prompt", "answer", "messages", "metadata"):
        check_text(getattr(problem, what), f"{what} of the problem")
    return problem


def _read_prompt(row: DataRow, config: SourceConfig) -> tuple[str, tuple[tuple[str, str], ...], str | None]:
    """(text, messages for the chat template, column that was read)."""
    fields, columns = config.columns, row.written
    system = (("system", config.system_prompt),) if config.system_prompt else ()
    column = _messages_column(columns, fields.prompt, fields.messages)
    if column is not None:
        if config.template is not None:
            raise ValueError(f"a template is for prompts that are text, and {column!r} has messages; leave the template out")
        messages = _read_messages(_get(columns, column), column)
        return messages[-1][1], messages if messages[0][0] == "system" else (*system, *messages), column
    if config.template is None:
        used, prompt = fields.prompt, _text(columns, config, "prompt")
    else:  # every column stays in the metadata, since the prompt shows it in another form
        used, prompt = None, _fill_template(config.template, row, fields.prompt)
    if system and not config.chat_template:
        raise ValueError(
            "a system_prompt is given, and a plain prompt has no place for it; set chat_template = true, or leave it out"
        )
    return prompt, (*system, ("user", prompt)) if config.chat_template else (), used


def _messages_column(columns: Mapping[str, Any], prompt_column: str, messages_column: str | None) -> str | None:
    if messages_column is not None:
        if _get(columns, messages_column) is None:
            raise ValueError(f"{messages_column!r} is missing (the keys are: {', '.join(columns) or 'none'})")
        return messages_column
    prompt = _get(columns, prompt_column)
    if isinstance(prompt, list) and prompt and all(isinstance(item, Mapping) for item in prompt):
        return prompt_column
    return "messages" if prompt is None and isinstance(columns.get("messages"), list) else None


def _get(columns: Mapping[str, Any], name: str) -> Any:
    """``a.b`` is the key b of column a. NaN, which pandas writes where a value is missing, is None."""
    value: Any = columns
    for part in [name] if name in columns else name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if value != value else value


def _text(columns: Mapping[str, Any], config: SourceConfig, field: str) -> str:
    named = config.columns.model_dump()
    name: str = named.pop(field)
    value = _get(columns, name)
    if value is None:
        parent, _, key = name.rpartition(".")
        outer = columns if name in columns else _get(columns, parent)
        if isinstance(outer, Mapping) and (name in columns or key in outer):
            raise ValueError(f"{name!r} is null or NaN")
        free = [key for key in columns if key not in ("messages", *named.values())]
        likely = shlex.quote(f"data.fields.{field}={free[-1 if field == 'answer' else 0]}") if free else ""
        hint = f"; if another key has it, say which one, such as {likely}" if free else ""
        raise ValueError(f"{name!r} is missing (the keys are: {', '.join(columns) or 'none'}){hint}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)  # the file has numbers as numbers
    if not isinstance(value, str):
        hint = ""
        if isinstance(value, Mapping) and value:
            hint = "; name one of its keys, such as " + shlex.quote(f"data.fields.{field}={name}.{next(iter(value))}")
        raise ValueError(f"{name!r} must be text, not {json.dumps(value)[:40]}{hint}")
    if not value.strip():
        raise ValueError(f"{name!r} is empty")
    return value


def encode_prompt(tokenizer: Tokenizer, problem: Problem) -> tuple[int, ...]:
    """Raises ValueError for unknown characters, or messages without a usable chat template."""
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
_ROLES = ("system", "user", "assistant", "tool")


def _fill_template(template: str, row: DataRow, prompt_column: str) -> str:
    """``{{`` is a brace. Raises ValueError for a missing or empty column."""

    def with_prompt(columns: Mapping[str, Any]) -> Mapping[str, Any]:
        text = _get(columns, prompt_column)
        return columns if text is None else {**columns, "prompt": text}

    columns = with_prompt(row.written)

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        value = _get(columns, name)
        if value is None or (isinstance(value, str) and not value.strip()):
            raise ValueError(f"the template has {{{name}}}, which is missing or empty (the keys are: {', '.join(columns)})")
        return value if isinstance(value, str) else json.dumps(_get(with_prompt(row.values()), name), ensure_ascii=False)

    return _PLACE.sub(fill, template)


def _read_messages(value: Any, column: str) -> tuple[tuple[str, str], ...]:
    """Raises ValueError, also if the last message needs no answer."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{column!r} must be a list of messages, each with role and content, not {json.dumps(value)[:40]}")
    messages = tuple(_message(message, f"{column}[{index}]") for index, message in enumerate(value))
    if messages[-1][0] not in ("user", "tool"):
        raise ValueError(
            f"the last message of {column!r} is the {messages[-1][0]}'s, and the model is to answer a user's; leave it out, or "
            "give it as the answer"
        )
    return messages


def _message(value: Any, place: str) -> tuple[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{place} is no message with role and content, but {json.dumps(value)[:40]}")
    role, content = value.get("role"), value.get("content")
    if role not in _ROLES:
        raise ValueError(f"{place} has the role {json.dumps(role)[:40]}; a role is one of {', '.join(_ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"the content of {place} must be text, not {json.dumps(content)[:40]}")
    more = [key for key, entry in value.items() if key not in ("role", "content") and entry is not None]
    if more:
        raise ValueError(f"{place} has {', '.join(more)} beside role and content, which prompts here do not take; leave it out")
    return str(role), content
