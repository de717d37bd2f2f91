"""Requests and answers of the OpenAI protocol. A field is refused if the run decides it."""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tepo_megatron.core.problem import ResponseText

_WITHOUT_EFFECT = frozenset(
    {
        *("model", "messages", "stream", "stream_options", "tools", "max_tokens", "max_completion_tokens"),
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    }
)
"""Accepted fields that do not change what the model writes."""

_USUAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "reasoning_effort": (),
    "verbosity": (),
}
"""Field → allowed values, which leave the model's distribution unchanged."""

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)


class RefusedError(Exception):
    """The text is for the agent."""

    def __init__(self, sentence: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """``messages``: the new ones; all if the conversation ``begins``, with ``tools`` for the template. ``max_tokens``: limit
    of the answer, if the agent sets one.
    """

    messages: tuple[Message, ...]
    begins: bool
    tools: tuple[dict[str, Any], ...] | None = None
    max_tokens: int | None = None

    def as_json(self) -> dict[str, Any]:
        tools = None if self.tools is None else list(self.tools)
        return {"messages": list(self.messages), "begins": self.begins, "tools": tools, "max_tokens": self.max_tokens}


@dataclass(frozen=True)
class ParsedRequest:
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    max_tokens: int | None
    stream: bool
    usage_in_stream: bool
    model: str


def read_request(body: Any, sampling: Mapping[str, Any], ignored: frozenset[str]) -> ParsedRequest:
    """Parses the body of ``/v1/chat/completions``. ``sampling``: the run's temperature, top_p, top_k, min_p and stop, which a
    request may repeat but not change. Fields in ``ignored`` are skipped. Raises RefusedError.
    """
    if not isinstance(body, dict):
        raise RefusedError("the body must be a JSON object")
    fields = {name: value for name, value in body.items() if value is not None and name not in ignored}
    for name, value in fields.items():
        _check_field(name, value, sampling)
    try:
        messages = read_messages(fields.get("messages"))
    except ValueError as error:
        raise RefusedError(str(error), param="messages") from None
    options = fields.get("stream_options")
    return ParsedRequest(
        messages,
        _tools(fields.get("tools")),
        _max_tokens(fields),
        fields.get("stream") is True,
        isinstance(options, dict) and bool(options.get("include_usage")),
        str(fields.get("model", "")),
    )


def _check_field(name: str, value: Any, sampling: Mapping[str, Any]) -> None:
    if name in _WITHOUT_EFFECT:
        return
    advice = f"leave it out, or let the run ignore it by environment.agent.ignore=[{name}]"
    if name in sampling:
        if not _same(value, sampling[name]):
            raise RefusedError(
                f"{name} = {_short(value)}, and the run draws with rollout.sampling.{name} = {_short(sampling[name])}: the "
                f"trainer scores what was drawn under the run's own distribution; send the same, {advice}",
                param=name,
            )
    elif name in ("n", "logprobs", "top_logprobs"):
        if value not in _USUAL[name]:
            raise RefusedError(
                f"{name} = {_short(value)} is not answered here: an episode is one response; leave it out", param=name
            )
    elif name in _USUAL:
        if value not in _USUAL[name]:
            why = "would change what the model writes, and the trainer would not know"
            raise RefusedError(f"{name} = {_short(value)} {why}; {advice}", param=name)
    elif name == "seed":
        raise RefusedError(f"seed = {_short(value)}: the run gives each turn a seed of its own; {advice}", param=name)
    else:
        raise RefusedError(f"{name} is not known here, and might change what the model writes; leave it out", param=name)


def _same(given: Any, ours: Any) -> bool:
    if isinstance(ours, list):  # stop: text, or a list
        return ([given] if isinstance(given, str) else given) == ours
    if ours is None:  # top_k is off, which vLLM writes as 0 or -1
        return given in (0, -1)
    return type(given) in (int, float) and math.isclose(given, ours, rel_tol=1e-9)


def _tools(given: Any) -> list[dict[str, Any]] | None:
    if not given:
        return None
    if not isinstance(given, list) or not all(
        isinstance(item, dict) and item.get("type") == "function" and isinstance(item.get("function"), dict) for item in given
    ):
        raise RefusedError('tools must be a list of {"type": "function", "function": {…}}', param="tools")
    return given


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    bounds = [given[name] for name in ("max_tokens", "max_completion_tokens") if name in given]
    for bound in bounds:
        if type(bound) is not int or bound < 1:
            raise RefusedError(f"max_tokens = {_short(bound)} must be a whole number of at least 1", param="max_tokens")
    return min(bounds, default=None)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"


# -- answers ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatAnswer:
    message: Message
    finish_reason: str
    malformed: bool = False


def read_answer(action: ResponseText, tool_calls: str) -> ChatAnswer:
    text, calls, malformed = str(action), [], False
    if tool_calls == "hermes":
        for result in _CALL.findall(text):
            try:
                call = json.loads(result)
                function = {"name": str(call["name"]), "arguments": call.get("arguments") or {}}
            except (ValueError, TypeError, KeyError, AttributeError):
                malformed = True
                continue
            calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        if calls:
            text = _CALL.sub("", text).strip()
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = calls
    return ChatAnswer(message, "tool_calls" if calls else action.finish_reason, malformed)


def completion(asked: ParsedRequest, answer: ChatAnswer, action: ResponseText) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
        for call in answer.message.get("tool_calls", ())
    ]
    content = answer.message["content"]
    message = {"role": "assistant", "content": content or (None if calls else ""), **({"tool_calls": calls} if calls else {})}
    wrote = len(action.token_ids)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": asked.model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}],
        "usage": {
            "prompt_tokens": action.prompt_tokens,
            "completion_tokens": wrote,
            "total_tokens": action.prompt_tokens + wrote,
        },
    }


def chunks(whole: Mapping[str, Any], *, usage: bool) -> list[dict[str, Any]]:
    (choice,) = whole["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    common = {name: whole[name] for name in ("id", "created", "model")}
    common["object"] = "chat.completion.chunk"
    parts = [
        {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**common, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    return [*parts, {**common, "choices": [], "usage": whole["usage"]}] if usage else parts


Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(given: Any) -> list[Message]:
    """``developer`` becomes ``system``. Raises ValueError: no list of messages, content other than text, or a last message
    that is not to be answered.
    """
    if not isinstance(given, list) or not given:
        raise ValueError("messages must be a list of at least one message")
    messages = [_message(item, f"messages[{index}]") for index, item in enumerate(given)]
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            "the last message is the assistant's: the model would go on with words that it may not have written, and these "
            "would be trained on or lost; send a user's or a tool's message"
        )
    return messages


def same_messages(ours: Sequence[Message], theirs: Sequence[Message]) -> bool:
    """The model's messages are known by their tokens, so white space around their content and ids of calls are not compared."""
    return len(ours) == len(theirs) and all(_compared(a) == _compared(b) for a, b in zip(ours, theirs, strict=True))


@dataclass
class Conversation:
    said: list[Message] = field(default_factory=list)
    tools: Any = None
    """From the first request, since a template shows them at the beginning."""

    def new(self, messages: Sequence[Message], tools: Any) -> list[Message] | None:
        """None if an earlier message or the tools differ, or if there is no new message."""
        if not self.said:
            return list(messages)
        known = len(self.said)
        goes_on = len(messages) > known and tools == self.tools and same_messages(self.said, messages[:known])
        return list(messages[known:]) if goes_on else None

    def why_not(self, messages: Sequence[Message], tools: Any) -> str:
        for index, (ours, theirs) in enumerate(zip(self.said, messages, strict=False)):
            if _compared(ours) != _compared(theirs):
                if ours["role"] != theirs["role"]:
                    return f"message {index} was the {ours['role']}'s and is the {theirs['role']}'s"
                return f"message {index} ({ours['role']}) was {_abbreviated(ours)} and is {_abbreviated(theirs)}"
        if tools != self.tools:
            return "the tools are others than in the request before"
        return f"it has {len(messages)} messages, none of them behind the {len(self.said)} that were said"

    def heard(self, messages: Sequence[Message], tools: Any) -> None:
        self.said, self.tools = list(messages), tools

    def answered(self, message: Message) -> None:
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
    for item in given if isinstance(given, list) else [None]:
        call: Mapping[str, Any] = item if isinstance(item, Mapping) else {}
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"tool_calls of {place} must be a list of calls, each with a function and its name")
        arguments = function.get("arguments", "")
        try:
            result = json.loads(arguments) if isinstance(arguments, str) and arguments.strip() else arguments or {}
        except ValueError:
            result = arguments
        calls.append(
            {"id": str(call.get("id", "")), "type": "function", "function": {"name": function["name"], "arguments": result}}
        )
    return calls


def _compared(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {"role": "assistant", "content": message["content"].strip(), "calls": calls}


def _abbreviated(message: Message) -> str:
    return repr(message["content"] if len(message["content"]) <= 60 else f"{message['content'][:57]}…")
