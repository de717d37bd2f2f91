"""The prompts of episodes: the data's own, or for agents, who write theirs, what all chats begin with."""

from __future__ import annotations

from tepo_megatron.config.environment import EnvironmentConfig
from tepo_megatron.core.types import Problem
from tepo_megatron.tasks.data.prompts import encode_prompt
from tepo_megatron.tasks.data.tokenizer import Tokenizer


def prompt_of(environment: EnvironmentConfig | None, tokenizer: Tokenizer, problem: Problem) -> tuple[int, ...]:
    """The token ids of a problem's prompt. What an agent says first is its own, and differs from episode to episode: it is read
    behind a prompt of the token that every chat begins with, and counts as the environment's.

    Raises ValueError as ``encode_prompt`` and :func:`opening_of`.
    """
    opening = opening_of(environment, tokenizer)
    return encode_prompt(tokenizer, problem) if opening is None else opening


def opening_of(environment: EnvironmentConfig | None, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """The prompt of all episodes of agents, one token; None where the run has no agent.

    Raises ValueError: there is no chat template; or none is used, and the tokenizer puts no token before a text.
    """
    if environment is None or environment.adapter != "agent":
        return None
    if not environment.agent_settings.chat_template:
        begin = tokenizer.prompt_ids("")
        if not begin:
            raise ValueError(
                "environment.agent.chat_template = false: the model's tokenizer has no begin token, behind which an agent's "
                "words could be read; use a model with a chat template"
            )
        return tuple(begin[:1])
    try:
        return tuple(tokenizer.chat_ids([("user", "?")])[:1])
    except ValueError as error:
        raise ValueError(
            f"environment.adapter = agent: {error}; or set environment.agent.chat_template = false, and the contents of "
            "messages are read as they stand"
        ) from error
