"""Prompts and observations of episodes as token ids. What the model has read or written is not encoded again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tepo_megatron.config.environment import EnvironmentConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import TokenIds, token_ids
from tepo_megatron.tasks.data.chat import AnyMessage
from tepo_megatron.tasks.data.prompts import encode_prompt
from tepo_megatron.tasks.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Observations:
    """Without ``chat_ids`` an agent's messages are read as plain text. ``unknown``: id of unknown characters."""

    encode: Callable[[str], Sequence[int]]
    turn_ids: Callable[[Sequence[AnyMessage], bool], Sequence[int]]
    unknown: int | None
    vocab_size: int
    chat_ids: Callable[[Sequence[AnyMessage], Any], Sequence[int]] | None = None

    def ids(self, observation: Sequence[Any] | None, *, ended: bool | None, opening: TokenIds | None = None) -> TokenIds:
        """``ended``: whether the preceding turn has an end token; None: no turn precedes. ``opening``: an agent's prompt
        (:func:`opening_of`), which is left out of its chat.

        Raises ValueError: ids outside the vocabulary, characters unknown to the tokenizer, messages before the first turn or
        without a chat template.
        """
        if observation is None:
            return token_ids(())
        kind, value = observation
        if kind == "chat":
            return self._chat(value, ended=ended, opening=opening)
        if kind == "ids":
            return self._checked(value)
        if kind == "text":
            return self._known(self.encode(value), value)
        if ended is None:
            raise ValueError(
                "the environment's reset returned messages, but the prompt that begins a chat is the data's: give the problem "
                "messages, and return text, token ids or None from reset"
            )
        pairs = [(str(message["role"]), str(message["content"])) for message in value]
        return self._known(self.turn_ids(pairs, ended), " ".join(content for _, content in pairs))

    def _chat(self, request: Mapping[str, Any], *, ended: bool | None, opening: TokenIds | None) -> TokenIds:
        messages, tools = request["messages"], request["tools"]
        text = " ".join(message["content"] for message in messages)
        if self.chat_ids is None:
            if tools:
                raise ValueError(
                    "the agent sends tools, which need a chat template; set environment.agent.chat_template = true, or have "
                    "the agent describe its tools in a message"
                )
            return self._known([token for message in messages for token in self.encode(message["content"])], text)
        if not request["begins"]:
            return self._known(self.turn_ids(messages, bool(ended)), text)
        ids = self._known(self.chat_ids(messages, tools), text)
        if opening is None:
            return ids
        if ids[: opening.size].tolist() != opening.tolist():
            raise ValueError(
                f"the agent's chat begins with token {ids[:1].tolist()} in the model's chat template, and others begin with "
                f"{opening.tolist()}: all prompts of a run begin alike; use another template, or chat_template = false"
            )
        return ids[opening.size :]

    def _checked(self, ids: Sequence[int]) -> TokenIds:
        for index, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"the environment returned {token} as token {index} of its observation, which is no token of the model's "
                    f"vocabulary of {self.vocab_size}"
                )
        return token_ids(ids)

    def _known(self, ids: Sequence[int], text: str) -> TokenIds:
        if self.unknown is not None and self.unknown in ids:
            lost = [character for character in dict.fromkeys(text) if self.unknown in self.encode(character)] or [text[:60]]
            raise ValueError(
                f"the environment's observation has characters that the tokenizer does not know: {''.join(lost)[:60]!r}; "
                "change it, or use a model whose tokenizer knows them"
            )
        return token_ids(ids)


def prompt_of(environment: EnvironmentConfig | None, tokenizer: Tokenizer, problem: Problem) -> tuple[int, ...]:
    """Agents write their own first messages, which differ between episodes: their prompt is the token that begins every chat,
    and the messages count as the environment's. Raises ValueError as ``encode_prompt`` and :func:`opening_of`.
    """
    opening = opening_of(environment, tokenizer)
    return encode_prompt(tokenizer, problem) if opening is None else opening


def opening_of(environment: EnvironmentConfig | None, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """One token; None without agents. Raises ValueError if there is no chat template, or none is used and the tokenizer has no
    begin token.
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
