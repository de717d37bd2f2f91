"""Messages of the OpenAI protocol as this package has them, and what an agent and a model have said to each other.

A message is a dictionary with ``role`` and ``content`` (text), and where there are any with ``tool_calls`` (their arguments as
values, as chat templates read them), ``tool_call_id`` and ``name``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(given: Any) -> list[Message]:
    """The messages of a request. ``developer`` is ``system`` under another name.

    Raises ValueError, with a sentence: no list of messages, one with something else than text, or a last one that the model is
    not to answer.
    """
    if not isinstance(given, list) or not given:
        raise ValueError("messages must be a list of at least one message")
    messages = [_message(each, f"messages[{at}]") for at, each in enumerate(given)]
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            "the last message is the assistant's: the model would go on with words that it may not have written, and these "
            "would be trained on or lost; send a user's or a tool's message"
        )
    return messages


def same_messages(ours: Sequence[Message], theirs: Sequence[Message]) -> bool:
    """Whether they say the same. What the model wrote is known by its tokens, so that of its messages spaces around the content
    and the ids of calls are not compared.
    """
    return len(ours) == len(theirs) and all(_compared(a) == _compared(b) for a, b in zip(ours, theirs, strict=True))


@dataclass
class Conversation:
    """What was said so far in an episode: the messages that the agent sent, and those that the model wrote.

    An agent sends all of it with each request. What it sends must begin with what was said, and the rest is new.
    """

    said: list[Message] = field(default_factory=list)
    tools: Any = None
    """Those of the first request; a template shows them at the beginning."""

    def new(self, messages: Sequence[Message], tools: Any) -> list[Message] | None:
        """The messages behind those that were said: all where nothing was. None where they do not go on with what was said: one
        of them differs, there are fewer or no new ones, or the tools are others.
        """
        if not self.said:
            return list(messages)
        known = len(self.said)
        goes_on = len(messages) > known and tools == self.tools and same_messages(self.said, messages[:known])
        return list(messages[known:]) if goes_on else None

    def why_not(self, messages: Sequence[Message], tools: Any) -> str:
        """What of a request that does not go on is other than what was said, as part of a sentence."""
        for at, (ours, theirs) in enumerate(zip(self.said, messages, strict=False)):
            if _compared(ours) != _compared(theirs):
                if ours["role"] != theirs["role"]:
                    return f"message {at} was the {ours['role']}'s and is the {theirs['role']}'s"
                return f"message {at} ({ours['role']}) was {_short(ours)} and is {_short(theirs)}"
        if tools != self.tools:
            return "the tools are others than in the request before"
        return f"it has {len(messages)} messages, none of them behind the {len(self.said)} that were said"

    def heard(self, messages: Sequence[Message], tools: Any) -> None:
        """The agent said all of these messages, and the model is to answer."""
        self.said, self.tools = list(messages), tools

    def answered(self, message: Message) -> None:
        """The model answered."""
        self.said.append(message)


def _message(given: Any, place: str) -> Message:
    if not isinstance(given, Mapping):
        raise ValueError(f"{place} must be an object with role and content, not {type(given).__name__}")
    role = given.get("role")
    if role not in ROLES:
        raise ValueError(f"{place} has the role {str(role)[:40]!r}; a role is one of {', '.join(ROLES)}")
    message: Message = {"role": "system" if role == "developer" else role, "content": _text(given, place)}
    for name in ("name", "tool_call_id"):
        if given.get(name) is not None:
            if not isinstance(given[name], str):
                raise ValueError(f"{name} of {place} must be text")
            message[name] = given[name]
    if given.get("tool_calls"):
        message["tool_calls"] = _calls(given["tool_calls"], place)
    if given.get("function_call") is not None:
        raise ValueError(f"{place} has function_call, which tool_calls has taken the place of; send that")
    return message


def _text(given: Mapping[str, Any], place: str) -> str:
    content = given.get("content")
    if content is None:
        if given.get("role") != "assistant":
            raise ValueError(f"{place} has no content")
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"the content of {place} must be text or a list of text parts, not {type(content).__name__}")
    parts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"the content of {place} has a part of type {str(kind)[:40]!r}; the model reads text alone")
        parts.append(part["text"])
    return "".join(parts)


def _calls(given: Any, place: str) -> list[dict[str, Any]]:
    calls = []
    for each in given if isinstance(given, list) else [None]:
        call: Mapping[str, Any] = each if isinstance(each, Mapping) else {}
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"tool_calls of {place} must be a list of calls, each with a function and its name")
        arguments = function.get("arguments", "")
        try:
            found = json.loads(arguments) if isinstance(arguments, str) and arguments.strip() else arguments or {}
        except ValueError:
            found = arguments
        calls.append(
            {"id": str(call.get("id", "")), "type": "function", "function": {"name": function["name"], "arguments": found}}
        )
    return calls


def _compared(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {"role": "assistant", "content": message["content"].strip(), "calls": calls}


def _short(message: Message) -> str:
    return repr(message["content"] if len(message["content"]) <= 60 else f"{message['content'][:57]}…")
