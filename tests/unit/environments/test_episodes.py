"""Episodes of environments and of agents: the model reads exactly what was written, nothing is encoded again, no token is
written twice, and each ends once. What an agent sends beside what was said: what of it is new, and what is read of requests.
"""

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tepo_megatron.config.load import load_run
from tepo_megatron.config.reward import AgentConfig, EnvironmentConfig
from tepo_megatron.config.rollout import SamplingConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.run.sampling.inputs import Inputs
from tepo_megatron.sampler.sampling import prompt_seed
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tepo_megatron.tasks.environments.agent_session import (
    AgentRequest,
    AgentSession,
    ChatAnswer,
    ChatRequest,
    Message,
    RefusedError,
)
from tepo_megatron.tasks.environments.episodes import Observations, episode_prompt
from tepo_megatron.tasks.environments.protocol import StepResult
from tepo_megatron.tasks.environments.workers import EnvironmentWorkers
from tepo_megatron.tasks.reward.worker import check_value
from tests.support.chat_tokenizer import TEMPLATE, TOOLS_TEMPLATE, write_chat_tokenizer
from tests.support.episodes import END, VOCABULARY, Letters, Played, play, turn_of

PROMPT = (1, 7, 8)
LETTERS = Letters()
OBSERVATIONS = Observations(LETTERS, VOCABULARY)  # type: ignore[arg-type]

said = st.none() | st.text("abcdef", max_size=4) | st.lists(st.integers(0, VOCABULARY - 1), max_size=4)
"""What an environment says in a turn."""

scripts = st.lists(st.tuples(said, st.integers(-2, 2).map(float), st.booleans()), min_size=1, max_size=5)
"""The answers to a model's turns, their rewards, and whether it made a mistake; it is done with the last."""


class Scripted:
    """Says what its problem's metadata has, and notes what it was told."""

    def __init__(self, told: dict[str, list[list[Any]]]) -> None:
        self.told = told

    def reset(self, problem: Problem, seed: int) -> Any:
        self.script = list(problem.metadata["script"])
        self.heard: list[Any] = [seed]
        self.told.setdefault(problem.id, []).append(self.heard)
        return problem.metadata["first"]

    def step(self, action: ResponseText) -> StepResult:
        self.heard.append((str(action), action.token_ids, action.finish_reason))
        observation, reward, mistake = self.script.pop(0)
        return StepResult(observation, reward, not self.script, mistake)


def as_ids(observation: Any) -> list[int]:
    return LETTERS.encode(observation) if isinstance(observation, str) else list(observation or [])


@given(st.data())
def test_an_episode_is_what_both_sides_wrote(data: st.DataObject) -> None:
    """Against the same game played turn by turn without any driver."""
    n, order = data.draw(st.integers(1, 3)), random.Random(data.draw(st.integers(0, 99)))
    problems = [
        Problem(f"p{at}", "", "", {"script": data.draw(scripts), "first": data.draw(said)})
        for at in range(data.draw(st.integers(1, 3)))
    ]
    limits = {"max_turns": data.draw(st.integers(1, 5)), "max_tokens": data.draw(st.none() | st.integers(2, 30))}
    told: dict[str, list[list[Any]]] = {}
    played = Played(lambda: Scripted(told), order, OBSERVATIONS, lambda at: problems[at], limits, max_length=40)
    samples = played.samples
    with played.stream as stream:
        for at in range(len(problems)):
            stream.submit(at, PROMPT, 100 * at, n)
        found = play(stream)
    assert sorted(found) == [(at, index) for at in range(len(problems)) for index in range(n)]
    asked = {prompt: (seed, room) for _, prompt, seed, room in samples.asked}
    for (at, index), response in found.items():
        (end,) = [episode for episode, of in played.ended if of is response]
        ids, mask, reason, reward = alone(problems[at], 100 * at + index, limits, asked)
        assert response.response_ids.tolist() == ids
        assert (response.loss_mask.tolist() if response.loss_mask is not None else [True] * len(ids)) == mask
        assert response.logprobs[[not own for own in mask]].tolist() == [0.0] * mask.count(False)
        assert (response.logprobs[mask] < 0).all()
        if not any(mask):
            assert "leave no room for a turn" in end.error
            continue
        assert (end.error, end.reward, response.finish_reason) == (None, reward, reason)
    for problem in problems:
        for seed, *turns in told[problem.id]:
            assert seed == 100 * int(problem.id[1:])  # the group's, so that its episodes begin alike
            assert all(text == LETTERS.decode(token_ids) for text, token_ids, _ in turns)
    assert len(samples.left) == len(found)


def alone(problem: Problem, seed: int, limits: dict[str, Any], asked: Any) -> tuple[list[int], list[bool], str, float]:
    """Tokens, whose they are, why it ended, and its reward. ``asked``: what the servers read → (seed, room)."""

    def room_after(count: int) -> int:
        return min(40 - len(PROMPT), limits["max_tokens"] or 40) - count

    ids = as_ids(problem.metadata["first"])
    mask = [False] * len(ids)
    reward, turns = 0.0, 0
    if room_after(len(ids)) < 1:
        return [], [], "stop", 0.0
    for at, (observation, turn_reward, _) in enumerate(problem.metadata["script"], start=1):
        room = room_after(len(ids))
        turn = turn_of(prompt_seed(seed, len(ids)) if ids else seed, room, WeightsVersion(0))
        assert room == asked[*PROMPT, *ids][1]
        ids = [*ids, *turn.response_ids.tolist()]
        mask = [*mask, *[True] * turn.response_ids.size]
        reward, turns = reward + turn_reward, turns + 1
        if at == len(problem.metadata["script"]):
            return ids, mask, turn.finish_reason, reward
        more = as_ids(observation)
        if turns == limits["max_turns"] or room_after(len(ids) + len(more)) < 1:
            return ids, mask, "length", reward
        ids, mask = [*ids, *more], [*mask, *[False] * len(more)]
    raise AssertionError("it is done with its last answer")


@pytest.mark.parametrize(
    ("lost", "restarts", "ends"), [({1}, 1, True), ({2}, 1, True), ({3}, 1, True), ({2, 4}, 1, False), ({1}, 0, False)]
)
def test_a_lost_episode_is_begun_again_as_often_as_is_allowed(lost: set[int], restarts: int, ends: bool) -> None:
    """Call 1 is its reset; 2 and 3 its steps. It then writes the same again, with the same seeds."""
    problem = Problem("p", "", "", {"first": "a", "script": [("b", 0.5, False)] * 2})
    limits = {"max_restarts": restarts}
    played = Played(lambda: Scripted({}), random.Random(0), OBSERVATIONS, lambda _: problem, limits, lost=lost)
    samples = played.samples
    with played.stream as stream:
        stream.submit(0, PROMPT, 5, 1)
        found = play(stream)
    ((end, response),) = played.ended
    assert found[0, 0] is response
    assert (end.error is None) == ends
    if ends:
        assert (end.reward, end.turns, end.restarts) == (1.0, 2, 1)
        seeds = [seed for _, prompt, seed, _ in samples.asked if len(prompt) == len(PROMPT) + 1]
        assert len(set(seeds)) == 1
    else:
        assert "it was lost" in str(end.error)


numbers = st.floats() | st.sampled_from([1e308, -1e308, 1e39, 1e16, -1e15, 0.0])
components = st.dictionaries(st.sampled_from("abc"), numbers, min_size=1)


@example([0.0, 0.5, 1.0])
@example([0.0, {"a": 1.0}, {"a": 2.0, "b": 1.0}, 0.0])
@example([0.0, {"a": 0.0}])
@example([{"a": 1.0}, 1.0])
@example([0.5, 10**400])
@example([{"a": 1.0}, {"a": "1"}])
@example(["1"])
@given(st.lists(numbers, min_size=1, max_size=5) | st.lists(numbers | components, min_size=1, max_size=5))
def test_rewards_of_turns_are_added_numbers_or_components(turns: list[Any]) -> None:
    """0 adds to both. What a server sends that is no reward fails the episode."""
    problem = Problem("p", "", "", {"first": None, "script": [("b", reward, False) for reward in turns]})
    played = Played(lambda: Scripted({}), random.Random(0), OBSERVATIONS, lambda _: problem, {"max_turns": 9}, max_length=500)
    with played.stream as stream:
        stream.submit(0, PROMPT, 5, 1)
        play(stream)
    ((end, _),) = played.ended
    if any(check_value(reward)[0] is None for reward in turns):
        assert "the environment returned " in str(end.error)
        return
    paid = [reward for reward in turns if reward != 0.0]
    if len({type(reward) for reward in paid}) == 2:
        assert "a number as the reward of one turn, and components as that of another" in str(end.error)
        return
    names = {name for reward in paid if isinstance(reward, dict) for name in reward}
    expected: Any = {name: sum(reward.get(name, 0.0) for reward in paid) for name in names} if names else sum(paid)
    assert end.reward == expected or repr(end.reward) == repr(expected) or "nan" in repr(expected)


SAMPLING = EnvironmentWorkers.shared_setup(AgentConfig(), SamplingConfig(temperature=0.7, stop=("a",)))["sampling"]

texts = st.text("abc", max_size=4)
new = st.lists(st.tuples(st.sampled_from(["user", "tool", "system"]), texts), min_size=1, max_size=3)
"""What an agent says before an answer."""


def messages_of(pairs: Any) -> list[Message]:
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
            await ask(messages_of(told))
            spaces = data.draw(st.sampled_from(["", " ", "\n"]))
            messages += [*messages_of(told), {"role": "assistant", "content": f"{spaces}{answer.strip()}{spaces}"}]
        whole = [*messages, *messages_of(more)]
        await refused(messages, "none of them behind")
        await refused(whole, "the tools are others", [{"type": "function", "function": {"name": "f"}}])
        at = data.draw(st.integers(0, len(messages) - 1))
        edited = {**whole[at], "content": f"{whole[at]['content'].strip()}d"}
        await refused([*whole[:at], edited, *whole[at + 1 :]], f"message {at} (")
        dropped = [*whole[:at], *whole[at + 1 :]]
        if not (dropped[: len(messages)] == messages and len(dropped) > len(messages)):  # where two messages are equal
            await refused(dropped, "the agent sent another history")
        await ask(messages_of(more))

    asyncio.run(talking())


class ScriptedAgent:
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
        return ChatRequest(tuple(messages_of(messages)), self.turns[-1][1], None, most)


ROLE = {"user": 3, "tool": 4, "system": 5, "assistant": 6}
OPENING, GENERATE = 7, 6


def rendered(messages: Any) -> list[int]:
    return [token for each in messages for token in (ROLE[each["role"]], *LETTERS.encode(each["content"]), END)]


class Chat(Letters):
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
    played = Played(lambda: ScriptedAgent(wrote), order, observations, lambda at: problem, {"max_turns": 9}, max_length=400)
    with played.stream as stream:
        stream.submit(0, [OPENING], 5)
        response = play(stream)[0, 0]
    turns = wrote["p"]
    first = max(at for at, turn in enumerate(turns) if turn[1])
    ids: list[int] = []
    mask: list[bool] = []
    for messages, begun, most, action in turns[first:]:
        if not template:
            told = [token for _, content in messages for token in LETTERS.encode(content)]
        elif begun:
            told = [*rendered(messages_of(messages)), GENERATE]
        else:
            told = [*([] if ids[-1] == END else [END]), *rendered(messages_of(messages)), GENERATE]
        assert action.prompt_tokens == 1 + len(ids) + len(told)
        assert most is None or len(action.token_ids) <= most
        ids += [*told, *action.token_ids]
        mask += [*[False] * len(told), *[True] * len(action.token_ids)]
    assert response.response_ids.tolist() == ids
    assert (response.loss_mask is None and all(mask)) or response.loss_mask.tolist() == mask
    ((end, _),) = played.ended
    assert (end.error, end.reward, end.turns) == (None, 1.0, len(script))
    assert end.new_histories == sum(begun for _, begun, *_ in turns[1:])
    draws = [(prompt, seed) for _, prompt, seed, _ in played.samples.asked]
    assert len({*draws}) == len(draws)  # the same conversation again has another answer


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", 0.5, r"0.5, and the run draws with rollout.sampling.temperature = 0.7: .*ignore=\[temperature\]"),
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
    action.prompt_tokens = 7
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
    assert [each["id"] for each in message.get("tool_calls", [])] == [f"call_1_{index}" for index in range(len(calls))]
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
        request = await talk.wait()
        talk.give(action)
        return request, (await second)["choices"][0]["message"].get("tool_calls", [])

    request, later = asyncio.run(talking())
    assert request == ChatRequest(tuple(results), False)
    assert [item["id"] for item in later] == [f"call_2_{index}" for index in range(len(calls))]
    assert "tool_calls" not in ChatAnswer.read(action, "text").message


CALL = '<tool_call>\n{"name": "a"}\u00a0</tool_call>'


@pytest.mark.parametrize(
    ("written", "calls", "malformed", "content"),
    [
        ("<tool_call>{</tool_call>", 0, True, "<tool_call>{</tool_call>"),
        ("<tool_call>" + "\n" * 20_000, 0, False, "<tool_call>" + "\n" * 20_000),  # degenerate text costs no time
        ("<tool_call>" * 5_000, 0, False, "<tool_call>" * 5_000),
        (f"</tool_call> b{CALL}c{CALL}<tool_call> d ", 2, False, "</tool_call> bc<tool_call> d"),
        (f"<tool_call>{CALL}{CALL}</tool_call>", 1, True, "</tool_call>"),  # of two openings the first counts
    ],
)
def test_calls_of_tools_are_read_out_of_any_text(written: str, calls: int, malformed: bool, content: str) -> None:
    answer = ChatAnswer.read(ResponseText(written), "hermes")
    assert (len(answer.message.get("tool_calls", ())), answer.malformed) == (calls, malformed)
    assert answer.message["content"] == content


@pytest.mark.parametrize("template", [TEMPLATE, TOOLS_TEMPLATE])
def test_text_of_an_environment_is_a_message_where_the_prompt_is_one(template: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path, template))
    asked, plain = Problem("p", "1+2", "", messages=(("user", "1+2<|end|>"),)), Problem("q", "1+2", "")

    def shown(problem: Problem, observation: Any, *, ended: bool | None, **settings: Any) -> str:
        config = EnvironmentConfig.model_validate({"name": "a.py:A", **settings})
        observations = Observations(tokenizer, 400, special_tokens=config.special_tokens, role=config.role)
        prompt = episode_prompt(config, tokenizer, problem) if ended is None else ()
        return tokenizer.show([*prompt, *observations.ids(observation, ended=ended, chat=problem.messages)])

    said, answer = ["text", "3 <|user|>"], "⟦<|assistant|>⟧"
    assert shown(asked, said, ended=None) == f"⟦<|user|>⟧1+2<|end|>\n\n3 <|user|>⟦<|end|>⟧{answer}"
    assert shown(asked, None, ended=None) == tokenizer.show(tokenizer.chat_ids(asked.messages))
    assert shown(asked, ["ids", [9]], ended=None) == tokenizer.show([*tokenizer.chat_ids(asked.messages), 9])
    for ended, end in ((True, ""), (False, "⟦<|end|>⟧")):
        assert shown(asked, said, ended=ended) == f"{end}⟦<|user|>⟧3 <|user|>⟦<|end|>⟧{answer}"
    for problem, settings, text in (
        (asked, {"observations": "text"}, "3 <|user|>"),
        (asked, {"special_tokens": True}, "3 ⟦<|user|>⟧"),
        (plain, {"observations": "user"}, "3 <|user|>"),
    ):
        assert shown(problem, said, ended=True, **settings) == text
        assert shown(problem, said, ended=None, **settings).endswith(("⟦<|assistant|>⟧" if problem is asked else "1+2") + text)
    as_tool = shown(asked, said, ended=True, observations="tool")
    assert as_tool == shown(asked, said, ended=True, name="calculator")
    assert as_tool == ("<|tool|>" if template is TEMPLATE else "⟦<|user|>⟧") + f"3 <|user|>⟦<|end|>⟧{answer}"


def test_messages_and_tools_that_a_template_leaves_out_are_refused(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path, template))
    assert tokenizer.chat_ids([("user", "1+2")])
    for role in ("tool", "system"):
        with pytest.raises(ValueError, match=f"leaves messages of role {role} out.* environment.observations = user"):
            tokenizer.turn_ids([(role, "3")], ended=True)
        with pytest.raises(ValueError, match=f"leaves messages of role {role} out"):
            tokenizer.chat_ids([(role, ""), ("user", "1+2")])
    with pytest.raises(ValueError, match="has no place for tools"):
        tokenizer.chat_ids([("user", "1+2")], tools=[{"type": "function"}])
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "1+2"}], "answer": "3"}))
    files = [f"data.train={tmp_path}/p.jsonl", "data.heldout=null", "evaluate.every=0", "environment.name=calculator"]
    files += ["rollout.sampling.max_new_tokens=8"]
    model = resolve_model_path("builtin:tiny")
    with (
        patch("tepo_megatron.run.sampling.inputs.load_tokenizer", lambda *_: tokenizer),
        patch.object(tokenizer, "check_model"),
        pytest.raises(ValueError, match="of role tool out"),
    ):
        Inputs.read(load_run(None, files), model)


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
