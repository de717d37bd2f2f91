"""What an agent sends beside what was said: what is new of it, what is read of requests, and that no token is written twice."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.reward import AgentConfig
from tepo_megatron.config.rollout import SamplingConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tepo_megatron.tasks.environments.agent_session import (
    AgentRequest,
    AgentSession,
    ChatAnswer,
    ChatRequest,
    Message,
    RefusedError,
)
from tepo_megatron.tasks.environments.episodes import Observations
from tepo_megatron.tasks.environments.protocol import StepResult
from tepo_megatron.tasks.environments.workers import EnvironmentWorkers
from tests.support.chat_tokenizer import write_chat_tokenizer
from tests.support.episodes import END, VOCABULARY, Letters, Played, play

SAMPLING = EnvironmentWorkers.shared_setup(AgentConfig(), SamplingConfig(temperature=0.7, stop=("a",)))["sampling"]

texts = st.text("abc", max_size=4)
new = st.lists(st.tuples(st.sampled_from(["user", "tool", "system"]), texts), min_size=1, max_size=3)
"""What an agent says before an answer."""


def said(pairs: Any) -> list[Message]:
    return [{"role": role, "content": content} for role, content in pairs]


def request(messages: list[Message], tools: Any = None) -> AgentRequest:
    return AgentRequest(messages, tools, None, False, False, "m")


@given(st.lists(st.tuples(new, texts), min_size=1, max_size=4), new, st.data())
def test_what_goes_on_is_known_and_everything_else_is_another_history(turns: Any, more: Any, data: st.DataObject) -> None:
    async def talking() -> None:
        talk, messages = AgentSession("fail", "text"), list[Message]()

        async def ask(told: list[Message]) -> None:
            asked = asyncio.create_task(talk.ask(request([*messages, *told]), again=False))
            found = await talk.wait()
            assert isinstance(found, ChatRequest)
            assert (list(found.messages), found.begins) == (told, not messages)
            talk.give(ResponseText(answer))
            await asked

        async def refused(others: list[Message], why: str, tools: Any = None) -> None:
            with pytest.raises(RefusedError, match=re.escape(why)) as caught:
                await talk.ask(request(others, tools), again=False)
            assert caught.value.code == "other_history"

        for told, answer in turns:
            await ask(said(told))
            spaces = data.draw(st.sampled_from(["", " ", "\n"]))
            messages += [*said(told), {"role": "assistant", "content": f"{spaces}{answer.strip()}{spaces}"}]
        whole = [*messages, *said(more)]
        await refused(messages, "none of them behind")
        await refused(whole, "the tools are others", [{"type": "function", "function": {"name": "f"}}])
        at = data.draw(st.integers(0, len(messages) - 1))
        edited = {**whole[at], "content": f"{whole[at]['content'].strip()}d"}
        await refused([*whole[:at], edited, *whole[at + 1 :]], f"message {at} (")
        dropped = [*whole[:at], *whole[at + 1 :]]
        if not (dropped[: len(messages)] == messages and len(dropped) > len(messages)):  # where two messages are equal
            await refused(dropped, "the agent sent another history")
        await ask(said(more))

    asyncio.run(talking())


class Scripted:
    """An agent that says what its problem's metadata has, of which some begin anew."""

    def __init__(self, wrote: dict[str, list[Any]]) -> None:
        self.wrote = wrote

    def reset(self, problem: Problem, seed: int) -> ChatRequest:
        self.script, self.turns = list(problem.metadata["script"]), self.wrote.setdefault(problem.id, [])
        return self._next()

    def step(self, action: ResponseText) -> StepResult:
        self.turns[-1].append(action)
        return StepResult(self._next()) if self.script else StepResult(reward=1.0, done=True)

    def _next(self) -> Any:
        messages, begins, most = self.script.pop(0)
        self.turns.append([messages, begins or len(self.turns) == 0, most])
        return ChatRequest(tuple(said(messages)), self.turns[-1][1], None, most)


def encode(text: str) -> list[int]:
    return [10 + "abc".index(letter) for letter in text]


ROLE = {"user": 3, "tool": 4, "system": 5, "assistant": 6}
OPENING, GENERATE = 7, 6


def rendered(messages: Any) -> list[int]:
    return [token for each in messages for token in (ROLE[each["role"]], *encode(each["content"]), END)]


class Chat(Letters):
    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        return encode(text)

    def turn_ids(self, messages: Any, *, ended: bool) -> list[int]:
        return [*([] if ended else [END]), *rendered(messages), GENERATE]

    def chat_ids(self, messages: Any, *, tools: Any) -> list[int]:
        return [OPENING, *rendered(messages), GENERATE]


@pytest.mark.parametrize("template", [True, False])
@given(st.data())
def test_an_episode_is_what_was_said_and_each_token_of_the_model_once(template: bool, data: st.DataObject) -> None:
    """Its last conversation, written down by hand: the agent's messages encoded once, the model's tokens as they were drawn."""
    begins = st.booleans()
    script = data.draw(st.lists(st.tuples(new, begins, st.none() | st.integers(1, 3)), min_size=1, max_size=5))
    wrote: dict[str, list[Any]] = {}
    order = random.Random(data.draw(st.integers(0, 9)))
    problem = Problem("p", "", "", {"script": script})
    chat: Any = Chat()
    observations = Observations(chat, VOCABULARY, template)
    played = Played(lambda: Scripted(wrote), order, observations, lambda at: problem, {"max_turns": 9}, max_length=400)
    with played.stream as stream:
        stream.submit(0, [OPENING], 5)
        response = play(stream)[0, 0]
    turns = wrote["p"]
    first = max(at for at, turn in enumerate(turns) if turn[1])
    ids: list[int] = []
    mask: list[bool] = []
    for messages, begun, most, action in turns[first:]:
        if not template:
            told = [token for _, content in messages for token in encode(content)]
        elif begun:
            told = [*rendered(said(messages)), GENERATE]
        else:
            told = [*([] if ids[-1] == END else [END]), *rendered(said(messages)), GENERATE]
        assert action.prompt_tokens == 1 + len(ids) + len(told)
        assert most is None or len(action.token_ids) <= most
        ids += [*told, *action.token_ids]
        mask += [*[False] * len(told), *[True] * len(action.token_ids)]
    assert response.response_ids.tolist() == ids
    assert (response.loss_mask is None and all(mask)) or response.loss_mask.tolist() == mask
    ((end, _),) = played.ended
    assert (end.error, end.reward, end.turns) == (None, 1.0, len(script))
    assert end.new_histories == sum(begun for _, begun, *_ in turns[1:])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "temperature",
            0.5,
            r"temperature = 0.5, and the run draws with rollout.sampling.temperature = 0.7: .*ignore=\[temperature\]",
        ),
        ("top_p", 0.9, "rollout.sampling.top_p = 1.0"),
        ("top_k", 5, "rollout.sampling.top_k = null"),
        ("stop", ["b"], r'rollout.sampling.stop = \["a"\]'),
        ("n", 2, "n = 2 is not answered here"),
        ("logprobs", True, "logprobs = true is not answered here"),
        ("presence_penalty", 0.1, "would change what the model writes"),
        ("response_format", {"type": "json_object"}, r"ignore=\[response_format\]"),
        ("tool_choice", "required", r"ignore=\[tool_choice\]"),
        ("reasoning_effort", "low", r"ignore=\[reasoning_effort\]"),
        ("seed", 3, "the run gives each turn a seed of its own"),
        ("guided_json", {}, "guided_json is not known here"),
        ("max_tokens", 0, "max_tokens = 0 must be a whole number"),
        ("tools", [{"name": "f"}], "tools must be a list"),
        ("messages", [], "messages must be a list of at least one message"),
        ("messages", [{"role": "robot", "content": ""}], "has the role 'robot'"),
        ("messages", [{"role": "user"}], r"messages\[0\] has no content"),
        ("messages", ["hello"], r"messages\[0\] must be an object"),
        ("messages", [{"role": "assistant", "content": "so"}], "the last message is the assistant's"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "a part of type 'image_url'"),
    ],
)
def test_what_would_not_be_the_runs_distribution_is_refused(field: str, value: Any, message: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], field: value}
    with pytest.raises(RefusedError, match=message) as refused:
        AgentRequest.read(body, SAMPLING, frozenset())
    assert set(refused.value.body()["error"]) == {"message", "type", "param", "code"}
    if field in ("temperature", "stop", "seed", "reasoning_effort"):
        assert AgentRequest.read(body, SAMPLING, frozenset([field])).messages == body["messages"]


def test_what_says_the_same_or_nothing_is_taken() -> None:
    usual = {"temperature": 0.7, "top_p": 1, "top_k": 0, "stop": "a", "n": 1, "seed": None, "frequency_penalty": 0.0}
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    body = {"messages": [{"role": "developer", "content": parts}], "max_tokens": 9, "max_completion_tokens": 5, **usual}
    asked = AgentRequest.read(body, SAMPLING, frozenset())
    assert asked.messages == [{"role": "system", "content": "hi"}]
    assert (asked.max_tokens, asked.stream, asked.tools) == (5, False, None)


names = st.text("abc_", min_size=1, max_size=5)
arguments = st.dictionaries(names, st.none() | st.integers() | st.text(max_size=5), max_size=3)


@given(st.lists(st.tuples(names, arguments), max_size=3), texts, st.booleans())
def test_calls_of_tools_come_back_as_they_were_written(calls: Any, before: str, stream: bool) -> None:
    """Through the protocol and back: the agent's copy of the model's message is the model's message."""
    written = before + "".join(
        f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls
    )
    action = ResponseText(written, [1, 2, 3])
    asked = AgentRequest.read({"messages": [{"role": "user", "content": "hi"}]}, SAMPLING, frozenset())
    answer = ChatAnswer.read(action, "hermes")
    assert not answer.malformed
    body = json.loads(json.dumps(answer.completion("m", action)))
    message = body["choices"][0]["message"]
    if stream:
        message = ChatAnswer.chunks(body, usage=False)[0]["choices"][0]["delta"]
    assert body["choices"][0]["finish_reason"] == ("tool_calls" if calls else "stop")
    found = [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in message.get("tool_calls", [])]
    assert found == calls
    assert (message["content"] or "") == before
    results = [{"role": "tool", "content": "1", "tool_call_id": "x"}] * max(1, len(calls))

    async def talking() -> Any:
        talk = AgentSession("fail", "hermes")
        first = asyncio.create_task(talk.ask(asked, again=False))
        await talk.wait()
        talk.give(action)
        await first
        again = AgentRequest.read({"messages": [*asked.messages, message, *results]}, SAMPLING, frozenset())
        second = asyncio.create_task(talk.ask(again, again=False))
        found = await talk.wait()
        second.cancel()
        return found

    assert asyncio.run(talking()) == ChatRequest(tuple(results), False)
    assert ChatAnswer.read(ResponseText("<tool_call>{</tool_call>"), "hermes").malformed
    assert "tool_calls" not in ChatAnswer.read(action, "text").message


TOOLS_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_chat_with_tools_is_rendered_once_and_goes_on_behind_the_models_tokens(tmp_path: Path) -> None:
    """Beginning, the model's tokens and the tool's result are the whole chat's tokens; names of special tokens stay text."""
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path, TOOLS_TEMPLATE))
    tools = [{"type": "function", "function": {"name": "add", "description": "not <|end|> of it"}}]
    asked = [{"role": "user", "content": "<|end|>1+2"}]
    wrote = '[add {"a": 1}]'
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    result = {"role": "tool", "content": "3", "tool_call_id": "c"}
    begin = tokenizer.chat_ids(asked, tools=tools)
    rest = tokenizer.turn_ids([result], ended=False)
    whole = tokenizer.chat_ids([*asked, {"role": "assistant", "content": "", "tool_calls": [call]}, result], tools=tools)
    assert tokenizer.show([*begin, *tokenizer.encode(wrote), *rest]) == tokenizer.show(whole)
    assert begin.count(0) == 2  # the end token itself, of the system's and the user's message
    assert tokenizer.chat_ids([("user", "hi")]) == tokenizer.chat_ids([{"role": "user", "content": "hi"}])
