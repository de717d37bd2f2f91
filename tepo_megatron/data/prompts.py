"""Encodes prompts, and refuses characters that the tokenizer would lose."""

from __future__ import annotations

from collections.abc import Sequence

from tepo_megatron.config.data import DataConfig
from tepo_megatron.data.tokenizer import Tokenizer
from tepo_megatron.types import Problem


def encode_prompt(tokenizer: Tokenizer, problem: Problem, *, chat_template: bool = False) -> tuple[int, ...]:
    """Returns the token ids that the model reads for a problem.

    Raises:
        ValueError: the prompt has characters that the tokenizer does not know (the message names the problem and the
            characters), or a chat template is asked for and there is none.
    """
    ids = tokenizer.prompt_ids(problem.prompt, chat_template=chat_template)
    if tokenizer.unk_id is not None and tokenizer.unk_id in tokenizer.encode(problem.prompt):
        unknown = unknown_characters(tokenizer, problem.prompt) or problem.prompt
        raise ValueError(
            f"the prompt of problem {problem.id!r} has characters that the tokenizer does not know: {unknown!r}; "
            "change the prompt, or use a model whose tokenizer knows them"
        )
    return tuple(ids)


def usable_problems(problems: Sequence[Problem], tokenizer: Tokenizer, config: DataConfig) -> tuple[list[Problem], int]:
    """Returns the problems whose prompt has at most ``config.max_prompt_tokens`` tokens, and how many were left out.

    Every prompt is encoded here, so that one that cannot be is found before a run starts.

    Raises:
        ValueError: as ``encode_prompt``; or every prompt is too long.
    """
    lengths = [len(encode_prompt(tokenizer, problem, chat_template=config.chat_template)) for problem in problems]
    bound = config.max_prompt_tokens
    if bound is None:
        return list(problems), 0
    kept = [problem for problem, length in zip(problems, lengths, strict=True) if length <= bound]
    if not kept:
        raise ValueError(
            f"data.max_prompt_tokens = {bound} leaves no problem: the shortest of {len(lengths)} prompts has "
            f"{min(lengths, default=0)} tokens; raise it"
        )
    return kept, len(problems) - len(kept)


def unknown_characters(tokenizer: Tokenizer, text: str) -> str:
    """Returns the distinct characters of a text that the tokenizer does not know, in order of appearance."""
    if tokenizer.unk_id is None:
        return ""
    return "".join(character for character in dict.fromkeys(text) if tokenizer.unk_id in tokenizer.encode(character))
