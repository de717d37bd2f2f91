"""An agent's episode: the model answers its OpenAI requests."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tepo_megatron.core.problem import ResponseText
from tepo_megatron.runtime.text import check_text

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")

_WITHOUT_EFFECT = frozenset(
    {
        *("model", "messages", "stream", "stream_options", "tools", "max_tokens", "max_completion_tokens"),
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    }
)  # they do not change what the model writes

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
}  # these values leave the model's distribution unchanged

_CALL, _CALL_END = "<tool_call>", "</tool_call>"


class EpisodeError(Exception): ...


class RefusedError(Exception):
    """The text is for the agent."""

    def __init__(self, sentence: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class AgentRequest:
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    max_tokens: int | None
    stream: bool
    usage_in_stream: bool
    model: str

    @classmethod
    def read(cls, body: Any, sampling: Mapping[str, Any], ignored: frozenset[str]) -> AgentRequest:
        """A request may repeat ``sampling``, but not change it. Skips ``ignored`` fields. Raises RefusedError."""
        if not isinstance(body, dict):
            raise RefusedError("the body must be a JSON object")
        try:
            check_text(body, "the body")
        except ValueError as error:
            raise RefusedError(str(error)) from None
        fields = {name: value for name, value in body.items() if value is not None and name not in ignored}
        for name, value in fields.items():
            if (fault := _field_fault(name, value, sampling)) is not None:
                raise RefusedError(f"{name} = {_short(value)}{fault}", param=name)
        try:
            messages = _messages(fields.get("messages"))
        except ValueError as error:
            raise RefusedError(str(error), param="messages") from None
        options, tools = fields.get("stream_options"), fields.get("tools")
        if tools and not (isinstance(tools, list) and all(map(_is_tool, tools))):
            raise RefusedError('tools must be a list of {"type": "function", "function": {…}}', param="tools")
        bounds = [fields[name] for name in ("max_tokens", "max_completion_tokens") if name in fields]
        for bound in bounds:
            if type(bound) is not int or bound < 1:
                raise RefusedError(f"max_tokens = {_short(bound)} must be a whole number of at least 1", param="max_tokens")
        return cls(
            messages,
            tools or None,
            min(bounds, default=None),
            fields.get("stream") is True,
            isinstance(options, dict) and bool(options.get("include_usage")),
            str(fields.get("model", "")),
        )


def _field_fault(name: str, value: Any, sampling: Mapping[str, Any]) -> str | None:
    advice = f"leave it out, or let the run ignore it by environment.agent.ignore=[{name}]"
    if name in sampling:
        if _same(value, sampling[name]):
            return None
        return (
            f", and the run draws with rollout.sampling.{name} = {_short(sampling[name])}: the trainer scores what was drawn "
            f"under the run's own distribution; send the same, {advice}"
        )
    if name in _WITHOUT_EFFECT or value in _USUAL.get(name, ()):
        return None
    if name in ("n", "logprobs", "top_logprobs"):
        return " is not answered here: an episode is one response; leave it out"
    if name in _USUAL:
        return f" would change what the model writes, and the trainer would not know; {advice}"
    if name == "seed":
        return f": the run gives each turn a seed of its own; {advice}"
    return f": {name} is not known here, and might change what the model writes; leave it out"


def _same(value: Any, ours: Any) -> bool:
    if isinstance(ours, list):  # stop: text, or a list
        return ([value] if isinstance(value, str) else value) == ours
    if ours is None:  # top_k is off, which vLLM writes as 0 or -1
        return value in (0, -1)
    return type(value) in (int, float) and abs(value) < 2**53 and math.isclose(value, ours, rel_tol=1e-9)


def _is_tool(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "function" and isinstance(item.get("function"), dict)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"


@dataclass(frozen=True)
class ChatAnswer:
    """``malformed``: a tool call cannot be read."""

    message: Message
    finish_reason: str
    malformed: bool = False

    @classmethod
    def read(cls, action: ResponseText, tool_calls: str, turn: int = 1) -> ChatAnswer:
        """``tool_calls`` is their format, ``turn`` the answer's number in the episode."""
        text, malformed = str(action), False
        calls: list[dict[str, Any]] = []
        between, content = _split(text) if tool_calls == "hermes" else ([], text)
        for written in between:
            try:
                call = json.loads(written)
                check_text(call, "the call")
                function = {"name": str(call["name"]), "arguments": call.get("arguments") or {}}
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                malformed = True
                continue
            # Templates print it, so the same episode must have the same.
            calls.append({"id": f"call_{turn}_{len(calls)}", "type": "function", "function": function})
        message: Message = {"role": "assistant", "content": content.strip() if calls else text}
        if calls:
            message["tool_calls"] = calls
        return cls(message, "tool_calls" if calls else action.finish_reason, malformed)

    def completion(self, model: str, action: ResponseText) -> dict[str, Any]:
        content, calls = self.message["content"], []
        for call in self.message.get("tool_calls", ()):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        message = {"role": "assistant", "content": content or (None if calls else "")}
        if calls:
            message["tool_calls"] = calls
        read, wrote = action.prompt_tokens, len(action.token_ids)
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": self.finish_reason}],
            "usage": {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote},
        }

    @staticmethod
    def chunks(completion: Mapping[str, Any], *, usage: bool) -> list[dict[str, Any]]:
        (choice,) = completion["choices"]
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
        common = {name: completion[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        parts = [
            {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {**common, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        ]
        return [*parts, {**common, "choices": [], "usage": completion["usage"]}] if usage else parts


def _split(text: str) -> tuple[list[str], str]:
    """Returns calls, and the text without them, in linear time."""
    calls, content, end = [], "", 0
    while (start := text.find(_CALL, end)) >= 0 and (close := text.find(_CALL_END, start)) >= 0:
        calls.append(text[start + len(_CALL) : close].strip())
        content += text[end:start]
        end = close + len(_CALL_END)
    return calls, content + text[end:]


def _messages(value: Any) -> list[Message]:
    """``developer`` becomes ``system``. Raises ValueError, also if the last message needs no answer."""
    if not isinstance(value, list) or not value:
        raise ValueError("messages must be a list of at least one message")
    messages = [_message(item, f"messages[{index}]") for index, item in enumerate(value)]
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            "the last message is the assistant's: the model would go on with words that it may not have written, and these "
            "would be trained on or lost; send a user's or a tool's message"
        )
    return messages


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, Mapping):
        raise ValueError(f"{place} must be an object with role and content, not {type(value).__name__}")
    role = value.get("role")
    if role not in _ROLES:
        raise ValueError(f"{place} has the role {str(role)[:40]!r}; a role is one of {', '.join(_ROLES)}")
    message: Message = {"role": "system" if role == "developer" else role, "content": _content(value, place)}
    for name in ("name", "tool_call_id"):
        if value.get(name) is not None:
            if not isinstance(value[name], str):
                raise ValueError(f"{name} of {place} must be text")
            message[name] = value[name]
    if value.get("tool_calls"):
        calls = value["tool_calls"]
        message["tool_calls"] = [_tool_call(call, place) for call in (calls if isinstance(calls, list) else [None])]
    if value.get("function_call") is not None:
        raise ValueError(f"{place} has function_call, which tool_calls has taken the place of; send that")
    return message


def _content(value: Mapping[str, Any], place: str) -> str:
    content = value.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if value.get("role") != "assistant":
            raise ValueError(f"{place} has no content")
        return ""
    if not isinstance(content, list):
        raise ValueError(f"the content of {place} must be text or a list of text parts, not {type(content).__name__}")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"the content of {place} has a part of type {str(kind)[:40]!r}; the model reads text alone")
    return "".join(part["text"] for part in content)


def _tool_call(value: Any, place: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"tool_calls of {place} must be a list of calls, each with a function and its name")
    arguments = function.get("arguments", "")
    try:
        read = json.loads(arguments) if isinstance(arguments, str) and arguments.strip() else arguments or {}
        check_text(read, "the arguments")
    except (ValueError, RecursionError):
        read = arguments
    return {"id": str(value.get("id", "")), "type": "function", "function": {"name": function["name"], "arguments": read}}


def _compared(message: Message) -> Message:
    """White space around content and ids of calls are not compared: tokens identify the model's messages."""
    if message["role"] != "assistant":
        return message
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {"role": "assistant", "content": message["content"].strip(), "calls": calls}


@dataclass(frozen=True)
class ChatRequest:
    """``messages``: the new ones, or all if the conversation ``begins``."""

    messages: tuple[Message, ...]
    begins: bool
    tools: tuple[dict[str, Any], ...] | None = None
    max_tokens: int | None = None


@dataclass
class _Turn:
    asked: AgentRequest
    answer: asyncio.Future[dict[str, Any]]
    waiting: int = 0


@dataclass(eq=False)
class AgentSession:
    """Connects an agent (``ask``) with its episode (``wait``, ``give``); one event loop. A refusal fails
    the episode.
    """

    history: Literal["fail", "restart"]
    tool_calls: str
    reward_ends: bool = False
    posted: Any = None
    result: Any = None
    error: BaseException | None = None
    _answers: int = 0
    _said: list[Message] = field(default_factory=list)
    _tools: Any = None  # from the first request: templates show tools at the beginning
    _turn: _Turn | None = None
    _request: ChatRequest | None = None
    _ended: bool = False
    _failure: str | None = None
    _closed: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, asked: AgentRequest, *, again: bool) -> dict[str, Any]:
        """``again``: a repeated request, which gets the same answer. Raises RefusedError."""
        turn = self._open_turn(asked, again=again) or self._begin(asked)
        turn.waiting += 1
        try:
            return await asyncio.shield(turn.answer)
        finally:
            turn.waiting -= 1

    def refuse(self, sentence: str) -> None:
        self._failure = self._failure or sentence
        self._news.set()

    def _open_turn(self, asked: AgentRequest, *, again: bool) -> _Turn | None:
        if self._failure is not None:
            raise RefusedError(f"the episode has failed: {self._failure}", code="episode_over")
        if self._closed or self._ended:
            raise _over()
        turn = self._turn
        if turn is None:
            return None
        before = turn.asked
        same = asked.tools == before.tools and list(map(_compared, asked.messages)) == list(map(_compared, before.messages))
        if turn.answer.done() and not (same and again):
            return None
        if same and (again or not turn.waiting):
            return turn
        raise RefusedError(
            "the agent asks again before it was answered; an episode is one conversation, so have it wait for each answer",
            code="one_at_a_time",
        )

    def _begin(self, asked: AgentRequest) -> _Turn:
        known, messages = len(self._said), asked.messages
        why = self._why_other(asked) if known else None
        continues = known > 0 and why is None
        if why is not None and self.history == "fail":
            raise RefusedError(
                f"the agent sent another history than what was said: {why}; an episode is trained on as one sequence, so "
                "send what was said and the new messages behind it, or set environment.agent.history = restart to train "
                "on the last conversation alone",
                code="other_history",
                param="messages",
            )
        self._said, self._tools = list(messages), asked.tools
        tools = None if continues or asked.tools is None else tuple(asked.tools)
        self._request = ChatRequest(tuple(messages[known if continues else 0 :]), not continues, tools, asked.max_tokens)
        self._turn = _Turn(asked, asyncio.get_running_loop().create_future())
        self._news.set()
        return self._turn

    def _why_other(self, asked: AgentRequest) -> str | None:
        for index, (ours, theirs) in enumerate(zip(self._said, asked.messages, strict=False)):
            if _compared(ours) != _compared(theirs):
                if ours["role"] != theirs["role"]:
                    return f"message {index} was the {ours['role']}'s and is the {theirs['role']}'s"
                was, now = (repr(text if len(text) <= 60 else f"{text[:57]}…") for text in (ours["content"], theirs["content"]))
                return f"message {index} ({ours['role']}) was {was} and is {now}"
        if asked.tools != self._tools:
            return "the tools are others than in the request before"
        if len(asked.messages) <= len(self._said):
            return f"it has {len(asked.messages)} messages, none of them behind the {len(self._said)} that were said"
        return None

    def post(self, reward: Any) -> None:
        self.posted = reward
        if self.reward_ends:
            self.end()

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        if not self._ended:
            self._ended, self.result, self.error = True, result, error
            self._news.set()

    async def wait(self) -> ChatRequest | None:
        """Returns None at the agent's end. Raises EpisodeError for a refused request."""
        while self._request is None and not self._ended and self._failure is None:
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            raise EpisodeError(self._failure)
        if self._ended:
            return None
        request, self._request = self._request, None
        return request

    def give(self, action: ResponseText) -> bool:
        """Returns whether a tool call cannot be read."""
        turn = self._turn
        assert turn is not None, "nothing was asked"
        self._answers += 1
        answer = ChatAnswer.read(action, self.tool_calls, self._answers)
        self._said.append(answer.message)
        if not turn.answer.done():
            turn.answer.set_result(answer.completion(turn.asked.model, action))
        return answer.malformed

    def close(self) -> None:
        self._closed = True
        turn = self._turn
        if turn is not None and not turn.answer.done():
            if turn.waiting:
                turn.answer.set_exception(_over())
            else:
                turn.answer.cancel()


def _over() -> RefusedError:
    return RefusedError("the episode is over", code="episode_over")
