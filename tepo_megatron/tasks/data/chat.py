"""Chat messages as token ids, by a Hugging Face tokenizer's own template."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

AnyMessage = tuple[str, str] | Mapping[str, Any]
"""A (role, content) pair; or a message as templates read it, with ``role``, ``content``, and what else it has, such as
``tool_calls``."""

_PRIVATE = range(0xE000, 0xF900)
"""Characters of no script, one of which stands for text that looks like a special token while the template is filled."""


def chat_ids(
    tokenizer: Any, messages: Sequence[AnyMessage], special: Sequence[str], tools: Sequence[Mapping[str, Any]] | None = None
) -> list[int]:
    """The ids of messages in the chat template of a transformers tokenizer, up to where the answer begins. ``tools``: functions
    that the template describes to the model, as the OpenAI protocol has them.

    A content may hold the text of a special token (``special``), such as ``<|im_end|>``: a template would write it among its
    own, and the user's text could end the user's turn. It is taken out before the template is filled, and encoded as plain
    text in its place; what the template itself writes stays special.

    Raises:
        ValueError: the template does not take these messages; with its own words.
    """
    hidden: list[str] = []
    plain = [as_mapping(each) for each in messages]
    told = "".join(text for each in (plain, tools or ()) for text in _texts(each))
    mark = next(chr(code) for code in _PRIVATE if chr(code) not in told)
    pattern = special_pattern(special)

    def hide(found: re.Match[str]) -> str:
        hidden.append(found[0])
        return f"{mark}{len(hidden) - 1}{mark}"

    filled = [with_texts(each, lambda text: pattern.sub(hide, text)) for each in plain]
    shown = {} if tools is None else {"tools": with_texts(tools, lambda text: pattern.sub(hide, text))}
    try:
        if not hidden:
            ids: list[int] = tokenizer.apply_chat_template(filled, add_generation_prompt=True, return_dict=False, **shown)
            return ids
        text = tokenizer.apply_chat_template(filled, add_generation_prompt=True, tokenize=False, **shown)
    except Exception as error:  # templates are programs, and raise what they like
        why = " ".join(str(error).split()) or type(error).__name__
        roles = ", ".join(str(each["role"]) for each in plain)
        raise ValueError(f"the tokenizer's chat template does not take messages of {roles}: {why}") from error
    ids = []
    for at, part in enumerate(re.split(rf"{mark}(\d+){mark}", text)):
        if at % 2:
            ids += tokenizer.encode(hidden[int(part)], add_special_tokens=False, split_special_tokens=True)
        elif part:
            ids += tokenizer.encode(part, add_special_tokens=False)
    return ids


def as_mapping(message: AnyMessage) -> Mapping[str, Any]:
    """The message as templates read it."""
    return message if isinstance(message, Mapping) else {"role": message[0], "content": message[1]}


def special_pattern(special: Sequence[str]) -> re.Pattern[str]:
    """Finds the texts of special tokens."""
    return re.compile("|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or r"(?!)")


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A message or a tool with each text in it changed, but for the names of its fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: with_texts(each, change) for name, each in value.items()}
    return [with_texts(each, change) for each in value] if isinstance(value, list | tuple) else value


def _texts(value: Any) -> list[str]:
    found: list[str] = []
    with_texts(value, lambda text: found.append(text) or text)  # type: ignore[func-returns-value]
    return found


_ANSWER = "\ue000"
"""Stands for what the model has written, which is not rendered again. A character of no script."""

_HIDDEN = "\ue001"
"""Stands on both sides of the number of a piece of text that looks like a special token."""


def turn_ids(
    tokenizer: Any, messages: Sequence[AnyMessage], *, ended: bool, special: Sequence[str], end_ids: Collection[int]
) -> list[int]:
    """The ids of the end of an answer, of messages, and of what begins the next answer, in the chat template of a transformers
    tokenizer. ``ended``: the answer has its end token already, which is one of ``end_ids`` and is left out.

    The text of a special token (``special``) in a content stays text: it cannot end a turn. Raises ValueError where there is no
    template, or it does not take these messages.
    """
    if not tokenizer.chat_template:
        raise ValueError("the environment returned messages, and the model's tokenizer has no chat template; return text")
    hidden: list[str] = []
    pattern = special_pattern(special)

    def hide(found: re.Match[str]) -> str:
        hidden.append(found[0])
        return f"{_HIDDEN}{len(hidden) - 1}{_HIDDEN}"

    before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    given = [as_mapping(each) for each in messages]
    plain = [with_texts(each, lambda text: pattern.sub(hide, re.sub(f"[{_ANSWER}{_HIDDEN}]", "", text))) for each in given]
    try:
        text = tokenizer.apply_chat_template([*before, *plain], add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates are programs, and raise what they like
        why = " ".join(str(error).split()) or type(error).__name__
        roles = ", ".join(str(each["role"]) for each in given)
        raise ValueError(f"the tokenizer's chat template takes no messages of {roles} behind an answer: {why}") from error
    _, answer, rest = text.partition(_ANSWER)
    if not answer:
        raise ValueError("the tokenizer's chat template leaves the model's answers out; have the environment return text")
    ids: list[int] = []
    for at, part in enumerate(re.split(rf"{_HIDDEN}(\d+){_HIDDEN}", rest)):
        if at % 2:
            ids += tokenizer.encode(hidden[int(part)], add_special_tokens=False, split_special_tokens=True)
        elif part:
            ids += tokenizer.encode(part, add_special_tokens=False)
    return ids[1:] if ended and ids and ids[0] in end_ids else ids
