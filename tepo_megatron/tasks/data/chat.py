"""Chat messages as token ids, with a Hugging Face tokenizer's template."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

AnyMessage = tuple[str, str] | Mapping[str, Any]
"""A (role, content) pair, or a mapping with further keys that templates read (``tool_calls``)."""

_PRIVATE = range(0xE000, 0xF900)
"""Private-use characters; one replaces text that looks like a special token while the template is rendered."""


def chat_ids(
    tokenizer: Any, messages: Sequence[AnyMessage], special: Sequence[str], tools: Sequence[Mapping[str, Any]] | None = None
) -> list[int]:
    """Ids up to the beginning of the answer. ``tools``: functions in the OpenAI format. The text of a special token
    (``special``) in a content, such as ``<|im_end|>``, is encoded as plain text: it must not end the user's turn. Raises
    ValueError if the template refuses the messages.
    """
    hidden: list[str] = []
    plain = [_as_mapping(message) for message in messages]
    texts = "".join(text for part in (plain, tools or ()) for text in _texts(part))
    mark = next(chr(code) for code in _PRIVATE if chr(code) not in texts)
    pattern = _special_pattern(special)

    def hide(found: re.Match[str]) -> str:
        hidden.append(found[0])
        return f"{mark}{len(hidden) - 1}{mark}"

    filled = [_with_texts(message, lambda text: pattern.sub(hide, text)) for message in plain]
    shown = {} if tools is None else {"tools": _with_texts(tools, lambda text: pattern.sub(hide, text))}
    try:
        if not hidden:
            ids: list[int] = tokenizer.apply_chat_template(filled, add_generation_prompt=True, return_dict=False, **shown)
            return ids
        text = tokenizer.apply_chat_template(filled, add_generation_prompt=True, tokenize=False, **shown)
    except Exception as error:  # templates are programs and raise anything
        why = " ".join(str(error).split()) or type(error).__name__
        roles = ", ".join(str(message["role"]) for message in plain)
        raise ValueError(f"the tokenizer's chat template does not take messages of {roles}: {why}") from error
    ids = []
    for index, part in enumerate(re.split(rf"{mark}(\d+){mark}", text)):
        if index % 2:
            ids += tokenizer.encode(hidden[int(part)], add_special_tokens=False, split_special_tokens=True)
        elif part:
            ids += tokenizer.encode(part, add_special_tokens=False)
    return ids


def _as_mapping(message: AnyMessage) -> Mapping[str, Any]:
    return message if isinstance(message, Mapping) else {"role": message[0], "content": message[1]}


def _special_pattern(special: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or r"(?!)")


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _with_texts(entry, change) for name, entry in value.items()}
    return [_with_texts(item, change) for item in value] if isinstance(value, list | tuple) else value


def _texts(value: Any) -> list[str]:
    texts: list[str] = []
    _with_texts(value, lambda text: texts.append(text) or text)  # type: ignore[func-returns-value]
    return texts


_ANSWER = "\ue000"
"""Placeholder for the model's answer, which is not rendered again."""

_HIDDEN = "\ue001"
"""Delimits the number of a replaced special token's text."""


def turn_ids(
    tokenizer: Any, messages: Sequence[AnyMessage], *, ended: bool, special: Sequence[str], end_ids: Collection[int]
) -> list[int]:
    """The ids that follow an answer, to the beginning of the next. ``ended``: the answer has its end token (one of
    ``end_ids``), which is left out. Raises as :func:`chat_ids`.
    """
    if not tokenizer.chat_template:
        raise ValueError("the environment returned messages, and the model's tokenizer has no chat template; return text")
    hidden: list[str] = []
    pattern = _special_pattern(special)

    def hide(found: re.Match[str]) -> str:
        hidden.append(found[0])
        return f"{_HIDDEN}{len(hidden) - 1}{_HIDDEN}"

    before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    mappings = [_as_mapping(message) for message in messages]
    plain = [
        _with_texts(message, lambda text: pattern.sub(hide, re.sub(f"[{_ANSWER}{_HIDDEN}]", "", text))) for message in mappings
    ]
    try:
        text = tokenizer.apply_chat_template([*before, *plain], add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates are programs and raise anything
        why = " ".join(str(error).split()) or type(error).__name__
        roles = ", ".join(str(message["role"]) for message in mappings)
        raise ValueError(f"the tokenizer's chat template takes no messages of {roles} behind an answer: {why}") from error
    _, answer, rest = text.partition(_ANSWER)
    if not answer:
        raise ValueError("the tokenizer's chat template leaves the model's answers out; have the environment return text")
    ids: list[int] = []
    for index, part in enumerate(re.split(rf"{_HIDDEN}(\d+){_HIDDEN}", rest)):
        if index % 2:
            ids += tokenizer.encode(hidden[int(part)], add_special_tokens=False, split_special_tokens=True)
        elif part:
            ids += tokenizer.encode(part, add_special_tokens=False)
    return ids[1:] if ended and ids and ids[0] in end_ids else ids
