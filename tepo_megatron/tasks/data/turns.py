"""How a chat goes on behind what a model has written: the tokens between its answer and where the next one begins."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from tepo_megatron.tasks.data.chat import AnyMessage, as_mapping, special_pattern, with_texts

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
