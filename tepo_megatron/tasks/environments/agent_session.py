"""An agent's episode: the model answers its OpenAI requests."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tepo_megatron.core.problem import ResponseText
from tepo_megatron.runtime.text import check_text, text_fault

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
    """``messages``: the new ones, or all if the conversation ``begins``."""

    messages: tuple[Message, ...]
    begins: bool
    tools: tuple[dict[str, Any], ...] | None = None
    max_tokens: int | None = None

    def as_json(self) -> dict[str, Any]:
        tools = None if self.tools is None else list(self.tools)
        return {"messages": list(self.messages), "begins": self.begins, "tools": tools, "max_tokens": self.max_tokens}


@dataclass(frozen=True)
class _ParsedRequest:
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    max_tokens: int | None
    stream: bool
    usage_in_stream: bool
    model: str


def read_request(body: Any, sampling: Mapping[str, Any], ignored: frozenset[str]) -> _ParsedRequest:
    """A request may repeat settings in ``sampling``, but not change them. ``ignored`` fields are skipped. Raises
    RefusedError.
    """
    if not isinstance(body, dict):
        raise RefusedError("the body must be a JSON object")
    if (fault := text_fault(body)) is not None:
        raise RefusedError(f"the body has {fault}; change it, or leave it out")
    fields = {name: value for name, value in body.items() if value is not None and name not in ignored}
    for name, value in fields.items():
        _check_field(name, value, sampling)
    try:
        messages = read_messages(fields.get("messages"))
    except ValueError as error:
        raise RefusedError(str(error), param="messages") from None
    options = fields.get("stream_options")
    return _ParsedRequest(
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


@dataclass(frozen=True)
class _ChatAnswer:
    message: Message
    finish_reason: str
    malformed: bool = False


def read_answer(action: ResponseText, tool_calls: str) -> _ChatAnswer:
    text, calls, malformed = str(action), [], False
    if tool_calls == "hermes":
        for result in _CALL.findall(text):
            try:
                call = json.loads(result)
                check_text(call, "the call")
                function = {"name": str(call["name"]), "arguments": call.get("arguments") or {}}
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                malformed = True
                continue
            calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        if calls:
            text = _CALL.sub("", text).strip()
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = calls
    return _ChatAnswer(message, "tool_calls" if calls else action.finish_reason, malformed)


def completion(asked: _ParsedRequest, answer: _ChatAnswer, action: ResponseText) -> dict[str, Any]:
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
    """``developer`` becomes ``system``. Raises ValueError, also if the last message needs no answer."""
    if not isinstance(given, list) or not given:
        raise ValueError("messages must be a list of at least one message")
    messages = [_message(item, f"messages[{index}]") for index, item in enumerate(given)]
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            "the last message is the assistant's: the model would go on with words that it may not have written, and these "
            "would be trained on or lost; send a user's or a tool's message"
        )
    return messages


def _same_messages(ours: Sequence[Message], theirs: Sequence[Message]) -> bool:
    """White space around content and ids of calls are not compared: tokens identify the model's messages."""
    return len(ours) == len(theirs) and all(_compared(a) == _compared(b) for a, b in zip(ours, theirs, strict=True))


@dataclass
class Conversation:
    said: list[Message] = field(default_factory=list)
    tools: Any = None  # from the first request: templates show tools at the beginning

    def new(self, messages: Sequence[Message], tools: Any) -> list[Message] | None:
        """None if an earlier message or the tools differ, or no message is new."""
        if not self.said:
            return list(messages)
        known = len(self.said)
        goes_on = len(messages) > known and tools == self.tools and _same_messages(self.said, messages[:known])
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
            check_text(result, "the arguments")
        except (ValueError, RecursionError):
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


OVER = "the episode is over"


class EpisodeError(Exception): ...


@dataclass(frozen=True)
class AgentEnd:
    result: Any = None
    error: BaseException | None = None


@dataclass
class _Turn:
    asked: _ParsedRequest
    answer: asyncio.Future[dict[str, Any]]
    waiting: int = 0


@dataclass(eq=False)
class AgentSession:
    """Connects an agent (:meth:`ask`) with its episode (:meth:`wait`, :meth:`give`), in one event loop. A refused request fails
    the episode: an agent that continues would be rewarded for something else.
    """

    history: Literal["fail", "restart"]
    tool_calls: str
    reward_ends: bool = False
    posted: Any = None
    malformed: bool = False
    _conversation: Conversation = field(default_factory=Conversation)
    _turn: _Turn | None = None
    _ask: ChatRequest | None = None
    _ended: AgentEnd | None = None
    _failure: str | None = None
    _closed: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, asked: _ParsedRequest, *, again: bool) -> dict[str, Any]:
        """``again``: a repeated request, which gets the same answer. Raises RefusedError."""
        turn = self._begun(asked, again=again) or self._begin(asked)
        turn.waiting += 1
        try:
            return await asyncio.shield(turn.answer)
        finally:
            turn.waiting -= 1

    def refuse(self, sentence: str) -> None:
        self._failure = self._failure or sentence
        self._news.set()

    def _begun(self, asked: _ParsedRequest, *, again: bool) -> _Turn | None:
        if self._closed or self._ended is not None or self._failure is not None:
            raise RefusedError(
                OVER if self._failure is None else f"the episode has failed: {self._failure}", code="episode_over"
            )
        turn = self._turn
        same = turn is not None and asked.tools == turn.asked.tools and _same_messages(turn.asked.messages, asked.messages)
        if turn is None or (turn.answer.done() and not (same and again)):
            return None
        if same and (again or not turn.waiting):
            return turn
        raise RefusedError(
            "the agent asks again before it was answered; an episode is one conversation, so have it wait for each answer",
            code="one_at_a_time",
        )

    def _begin(self, asked: _ParsedRequest) -> _Turn:
        new = self._conversation.new(asked.messages, asked.tools)
        begins = not self._conversation.said
        if new is None:
            if self.history == "fail":
                why = self._conversation.why_not(asked.messages, asked.tools)
                raise RefusedError(
                    f"the agent sent another history than what was said: {why}; an episode is trained on as one sequence, so "
                    "send what was said and the new messages behind it, or set environment.agent.history = restart to train "
                    "on the last conversation alone",
                    code="other_history",
                    param="messages",
                )
            new, begins = asked.messages, True
        self._conversation.heard(asked.messages, asked.tools)
        tools = None if asked.tools is None or not begins else tuple(asked.tools)
        self._ask = ChatRequest(tuple(new), begins, tools, asked.max_tokens)
        self._turn = _Turn(asked, asyncio.get_running_loop().create_future())
        self._news.set()
        return self._turn

    def post(self, reward: Any) -> None:
        self.posted = reward
        if self.reward_ends:
            self.end(AgentEnd())

    def end(self, ended: AgentEnd) -> None:
        if self._ended is None:
            self._ended = ended
            self._news.set()

    async def wait(self) -> ChatRequest | AgentEnd:
        """Raises EpisodeError for a refused request."""
        while self._ask is None and self._ended is None and self._failure is None:
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            raise EpisodeError(self._failure)
        if self._ended is not None:
            return self._ended
        assert self._ask is not None
        ask, self._ask = self._ask, None
        return ask

    def give(self, action: ResponseText) -> None:
        turn = self._turn
        assert turn is not None, "nothing was asked"
        answer: _ChatAnswer = read_answer(action, self.tool_calls)
        self.malformed = answer.malformed
        self._conversation.answered(answer.message)
        if not turn.answer.done():
            turn.answer.set_result(completion(turn.asked, answer, action))

    def close(self) -> None:
        self._closed = True
        turn = self._turn
        if turn is not None and not turn.answer.done():
            if turn.waiting:
                turn.answer.set_exception(RefusedError(OVER, code="episode_over"))
            else:
                turn.answer.cancel()
