"""Encodes prompts, and refuses characters that the tokenizer would lose."""

from __future__ import annotations

from tepo_megatron.core.types import Problem
from tepo_megatron.tasks.data.tokenizer import Tokenizer


def encode_prompt(tokenizer: Tokenizer, problem: Problem) -> tuple[int, ...]:
    """Returns the token ids that the model reads for a problem: its messages in the chat template, or else its prompt.

    Raises:
        ValueError: the prompt has characters that the tokenizer does not know (the message names the problem and the
            characters), or there are messages and no chat template, or it does not take them.
    """
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
        unknown = unknown_characters(tokenizer, text) or text
        raise ValueError(
            f"the prompt of problem {problem.id!r} has characters that the tokenizer does not know: {unknown!r}; "
            "change the prompt, or use a model whose tokenizer knows them"
        )
    return tuple(ids)


def unknown_characters(tokenizer: Tokenizer, text: str) -> str:
    """Returns the distinct characters of a text that the tokenizer does not know, in order of appearance."""
    if tokenizer.unk_id is None:
        return ""
    return "".join(character for character in dict.fromkeys(text) if tokenizer.unk_id in tokenizer.encode(character))
