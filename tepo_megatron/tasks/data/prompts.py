"""Prompts by a template or as chat messages, and as token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.tokenizer import Tokenizer


def encode_prompt(tokenizer: Tokenizer, problem: Problem) -> tuple[int, ...]:
    """Raises ValueError: characters unknown to the tokenizer, or messages without a chat template or refused by it."""
    texts = [content for _, content in problem.messages] or [problem.prompt]
    if problem.messages:
        try:
            ids = tokenizer.chat_ids(problem.messages)
        except ValueError as error:
            raise ValueError(f"the prompt of problem {problem.id!r} cannot be encoded: {error}") from error
    else:
        ids = tokenizer.prompt_ids(problem.prompt)
    if tokenizer.unk_id is not None and any(tokenizer.unk_id in tokenizer.encode(text) for text in texts):
        text = "".join(texts)
        unknown = _unknown_characters(tokenizer, text) or text
        raise ValueError(
            f"the prompt of problem {problem.id!r} has characters that the tokenizer does not know: {unknown!r}; "
            "change the prompt, or use a model whose tokenizer knows them"
        )
    return tuple(ids)


def _unknown_characters(tokenizer: Tokenizer, text: str) -> str:
    if tokenizer.unk_id is None:
        return ""
    return "".join(character for character in dict.fromkeys(text) if tokenizer.unk_id in tokenizer.encode(character))


_PLACE = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*(?:\.\w+)*)\}")

ROLES = ("system", "user", "assistant", "tool")


def fill_template(template: str, columns: Mapping[str, Any], named: Mapping[str, Any]) -> str:
    """``{name}`` is a column and ``{a.b}`` the key b of the column a. ``{{`` and ``}}`` are braces; other braces stay.
    ``named`` values take precedence. Raises ValueError for a missing or empty column.
    """

    def fill(found: re.Match[str]) -> str:
        name = found[1]
        if name is None:
            return found[0][0]
        value: Any = {**columns, **named}
        for part in [name] if name in value else name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise ValueError(f"the template has {{{name}}}, and the keys are: {', '.join(columns) or 'none'}")
            value = value[part]
        if value is None or (isinstance(value, str) and not value.strip()):
            raise ValueError(f"{name!r} is empty, and the template has it")
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return _PLACE.sub(fill, template)


def read_messages(given: Any, column: str) -> tuple[tuple[str, str], ...]:
    """(role, content) pairs. Raises ValueError, with the column's name, if ``given`` is no such list or its last message is
    not to be answered.
    """
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
