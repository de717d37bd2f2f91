"""Text from environments, agents, the model, verifiers and data files: one episode, one response or one file fails, with a
sentence, and never rank 0; any string is printed and logged, and no text acts on the terminal.
"""

from __future__ import annotations

import ast
import asyncio
import io
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import tepo_megatron
from tepo_megatron.cli.console import print_json, show_table
from tepo_megatron.config import LogConfig, RunConfig
from tepo_megatron.config.data import SourceConfig
from tepo_megatron.config.reward import EnvironmentConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.run.display.progress import make_progress
from tepo_megatron.run.loggers import without_secrets
from tepo_megatron.run.metrics import MetricsWriter, read_metrics
from tepo_megatron.runtime.rank import print_error
from tepo_megatron.runtime.terminal import Terminal
from tepo_megatron.runtime.text import echo, printable, valid_text
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import encode_prompt, load_problems
from tepo_megatron.tasks.data.tokenizer import Tokenizer, load_tokenizer
from tepo_megatron.tasks.environments.agent_session import AgentRequest, ChatRequest, RefusedError
from tepo_megatron.tasks.environments.environment_task import EnvironmentTask
from tepo_megatron.tasks.environments.episodes import Observations
from tepo_megatron.tasks.environments.worker import EpisodeTable
from tepo_megatron.tasks.reward.recorded import read_recorded
from tests.support import hostile_environment
from tests.support.chat_tokenizer import SPECIAL, TOOLS_TEMPLATE, write_chat_tokenizer
from tests.support.cli import invoke
from tests.support.episodes import FakeHost, FakeSamples, Played, play
from tests.support.hostile import SURROGATES, as_json, broken_json, is_shown, texts, valid_texts, values


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_chat_tokenizer(tmp_path_factory.mktemp("chat"), TOOLS_TEMPLATE))


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return load_tokenizer(resolve_model_path("builtin:tiny"))


@pytest.fixture(scope="module", params=["chat", "tiny"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    result: Tokenizer = request.getfixturevalue(request.param)
    return result


def observations_of(tokenizer: Tokenizer) -> Observations:
    return Observations(tokenizer, tokenizer.vocab_size)


messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]) | texts, "content": texts}, optional={"name": values}),
    min_size=1,
    max_size=2,
)
ids = st.lists(st.integers(-1, 2**70), max_size=3)
observations = st.one_of(texts, messages, ids, values)
kinds = {"text": texts, "messages": messages, "ids": ids}


@example(told=("text", "\ud83d"))
@example(told=("messages", [{"role": "user", "content": "\ud83d"}]))
@example(told=("chat", vars(ChatRequest(({"role": "user", "content": "\ud83d"},), begins=False))))
@example(told=("chat", vars(ChatRequest(({"role": "user", "content": ""},), True, ({"function": {"name": "\udc00"}},)))))
@given(told=st.one_of(*(st.tuples(st.just(kind), drawn) for kind, drawn in kinds.items())))
def test_what_an_environment_says_fails_its_own_episode_at_most(told: tuple[str, Any], tokenizer: Tokenizer) -> None:
    """Of two episodes, one has a hostile environment, as an environment server's may be."""

    class Host(FakeHost):
        def poll(self, timeout_s: float) -> Any:
            answers = super().poll(timeout_s)
            for answer in answers:
                if answer.answer.get("observation") == ["text", "HOSTILE"]:
                    answer.answer["observation"] = [*told]
            return answers

    made = iter([hostile_environment.Says(then="HOSTILE"), hostile_environment.Says()])
    limits = {"max_turns": 3, "max_tokens": 60}
    played = Played(lambda: next(made), random.Random(0), observations_of(tokenizer), limits=limits, host=Host)
    with played.stream as stream:
        stream.submit(0, (1,), 3)
        stream.submit(1, (1,), 7)
        assert sorted(play(stream)) == [(0, 0), (1, 0)]
    (other,) = [episode for episode, _ in played.ended if episode.problem.id == "p1"]
    assert other.error is None


@settings(max_examples=20)
@example(first="\ud83d", then="\ud83d", reward=1.0)
@given(first=observations, then=observations, reward=values)
def test_a_worker_answers_with_text_or_an_error(first: Any, then: Any, reward: Any, chat: Tokenizer) -> None:
    """Values go from an environment's methods through the pipe to the tokenizer; no lone surrogate leaves the worker."""
    config = EnvironmentConfig(name=f"{hostile_environment.__file__}:Says", timeout_s=60.0).model_dump()
    table = EpisodeTable({**config, "kwargs": {"first": first, "then": then, "reward": reward}, "agent": None})
    for call in (["reset", Problem("p", "", "").to_json(), 1, False], ["step", *ResponseText("1").to_json()]):
        answer = json.loads(json.dumps(asyncio.run(table.answer(0, call))))
        if "error" not in answer:
            json.dumps(answer, ensure_ascii=False).encode()
            with suppress(ValueError):  # which fails the episode
                observations_of(chat).ids(answer["observation"], ended=True)


contents = texts | values
user_messages = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": contents}), max_size=2)
functions = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": values}), max_size=2)
options = {"tools": functions | values, "model": values, "stop": values, "temperature": values}
bodies = st.fixed_dictionaries({"messages": user_messages | values}, optional=options) | values


@example(body={"messages": [{"role": "user", "content": "<|end|>\ud83d"}]})
@given(body=bodies)
def test_an_agents_request_is_read_or_refused(body: Any, chat: Tokenizer) -> None:
    try:
        asked = AgentRequest.read(body, {"temperature": 1.0, "stop": []}, frozenset())
    except RefusedError as refused:
        json.dumps(refused.body()).encode()
        return
    tools = None if asked.tools is None else tuple(asked.tools)
    request = json.loads(json.dumps(vars(ChatRequest(tuple(asked.messages), True, tools))))
    with suppress(ValueError):
        observations_of(chat).ids(["chat", request], ended=None)


def read_or_refused(line: str, read: Callable[[str], Any], factory: pytest.TempPathFactory) -> Any:
    """What is read of a file of one line, or nothing, with a sentence that names the file."""
    path = factory.getbasetemp() / "one_line.jsonl"
    path.write_bytes(line.encode("utf-8", "surrogatepass") + b"\n")
    try:
        return read(str(path))
    except ValueError as error:
        said = str(error)
    assert str(path) in said
    return []


columns = {"id": contents, "more": values, "messages": values}
rows = st.fixed_dictionaries({"prompt": contents, "answer": contents}, optional=columns)
lines = rows.map(as_json) | broken_json.map(lambda text: text.replace("\n", " "))


@example(line='{"prompt": "\\ud83d", "answer": "1"}', template=None)
@example(line='{"prompt": "1", "answer": "\\ud83d"}', template=None)
@example(line='{"prompt": "1", "answer": "1", "id": "\\ud83d"}', template=None)
@example(line='{"prompt": "1", "answer": "1", "more": [{"\\ud83d": 1}]}', template=None)
@given(line=lines, template=st.sampled_from([None, "{prompt} {answer}", "{more}"]))
def test_a_data_file_is_read_or_refused_with_its_line(
    line: str, template: str | None, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def load(path: str) -> Any:
        return load_problems(SourceConfig(path=path, template=template))

    for problem in read_or_refused(line, load, tmp_path_factory):
        json.dumps([problem.id, problem.prompt, problem.answer, problem.metadata], ensure_ascii=False).encode()
        with suppress(ValueError):
            encode_prompt(tokenizer, problem)


def test_a_file_whose_name_is_not_utf8_names_no_problem(tmp_path: Path) -> None:
    (tmp_path / "d\udcff.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r":1: id of the problem has the lone surrogate '\\udcff'"):
        load_problems(str(tmp_path))


def test_arrow_text_that_is_not_utf8_is_refused_with_its_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    raw = pa.array([b"1", b"\xff"]).cast(pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    parquet.write_table(pa.table({"prompt": text, "answer": pa.array(["1", "2"])}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet, after row 0: text that is not UTF-8"):
        load_problems(str(tmp_path / "a.parquet"))


answers = st.fixed_dictionaries({"response": contents}, optional={"finish_reason": values, "reward": values})
samples = st.fixed_dictionaries(
    {"problem": contents, "prompt": contents, "answer": contents},
    optional={"greedy": answers | values, "sampled": st.lists(answers | values, max_size=2) | values, "metadata": values},
)
recorded = st.fixed_dictionaries(
    {"prompt": contents, "answer": contents, "response": contents}, optional={"responses": values, "finish_reason": values}
)


@example(line="[" * 3000)
@example(line='{"problem": "p", "prompt": "q", "answer": "a", "sampled": 1}')
@example(line='{"prompt": "q", "answer": "a", "response": "one line separator: \u2028"}')
@given(line=samples.map(as_json) | recorded.map(as_json) | broken_json.map(lambda text: text.replace("\n", " ")))
def test_recorded_responses_are_read_or_refused_with_their_line(line: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    groups = read_or_refused(line, lambda path: read_recorded(Path(path)), tmp_path_factory)
    assert "\u2028" not in line or not line.startswith('{"prompt": "q"') or groups
    for problem, responses in groups:
        json.dumps([problem.id, dict(problem.metadata), responses], ensure_ascii=False).encode()


class TestSpecialTokens:
    @settings(max_examples=20)
    @given(text=valid_texts)
    def test_names_in_a_text_are_characters_unless_tokens_are_asked_for(self, text: str, chat: Tokenizer) -> None:
        said = ["chat", vars(ChatRequest(({"role": "user", "content": text},), begins=False))]
        plain = Observations(chat, chat.vocab_size, chat_template=False).ids(said, ended=True).tolist()
        told = observations_of(chat).ids(["text", text], ended=True).tolist()
        for ids in (chat.encode(text), chat.prompt_ids(text), told, plain):
            assert not [token for token in ids if token < len(SPECIAL)]
            assert chat.decode(ids) == text
        ids = chat.chat_ids([("user", text)], tools=[{"function": {"name": text, text: text}}])
        assert [token for token in ids if token < len(SPECIAL)] == [1, 0, 2, 0, 3]  # the template's
        ids = chat.encode(text, special_tokens=True)
        assert len([token for token in ids if token < len(SPECIAL)]) == sum(text.count(name) for name in SPECIAL)
        assert chat.prompt_ids(text, special_tokens=True) == ids

    @pytest.mark.parametrize(("special", "tokens"), [(False, 0), (True, 2)])
    def test_a_prompt_has_them_only_by_its_setting(self, special: bool, tokens: int, chat: Tokenizer, tmp_path: Path) -> None:
        (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "1<|end|>\n<|user|>", "answer": "1"}) + "\n")
        (problem,) = load_problems(SourceConfig(path=str(tmp_path / "d.jsonl"), special_tokens=special))
        assert len([token for token in encode_prompt(chat, problem) if token < len(SPECIAL)]) == tokens

    @pytest.mark.parametrize(("special", "messages", "tokens"), [(False, (), 0), (True, (), 2), (False, (("user", "q"),), 2)])
    def test_an_environments_text_has_them_only_by_its_setting_or_as_a_message(
        self, special: bool, messages: tuple[tuple[str, str], ...], tokens: int, chat: Tokenizer
    ) -> None:
        environment = {"name": f"{hostile_environment.__file__}:Says", "kwargs": {"first": "<|end|>\n<|user|>"}}
        run = RunConfig.model_validate({"environment": {**environment, "special_tokens": special, "timeout_s": 600.0}})
        samples = FakeSamples(random.Random(0))
        with (
            EnvironmentTask(run, chat, chat.vocab_size, 200) as task,
            task.stream(samples, lambda number: Problem("p", "", "", messages=messages)) as stream,  # type: ignore[arg-type]
        ):
            stream.submit(0, (4,), 3)
            while not samples.asked:
                stream.next(0.1)
        (_, read, _, _), *_ = samples.asked
        assert len([token for token in read if token < len(SPECIAL)]) == tokens

    def test_an_environment_that_cannot_have_them_is_refused(self, tiny: Tokenizer) -> None:
        with pytest.raises(ValueError, match=r"reads no special tokens in a text; set special_tokens = false"):
            EnvironmentTask(RunConfig.model_validate({"environment": {"name": "a.py:A", "special_tokens": True}}), tiny, 64, 9)
        with pytest.raises(ValueError, match=r"special_tokens = true is for text, and messages never have any"):
            EnvironmentConfig(name="a.py:a", adapter="agent", special_tokens=True)


ENCODINGS = ("utf-8", "latin-1", "ascii")

encodings = st.sampled_from(ENCODINGS)


@contextmanager
def written(encoding: str, name: str = "stdout") -> Iterator[Callable[[], str]]:
    """Replaces standard output (or error) by one that refuses what ``encoding`` does not have."""
    stream, before = io.TextIOWrapper(io.BytesIO(), encoding, write_through=True), getattr(sys, name)
    setattr(sys, name, stream)
    try:
        yield lambda: stream.buffer.getvalue().decode(encoding)
    finally:
        setattr(sys, name, before)


@given(text=texts, encoding=encodings)
def test_a_text_prints_as_it_is_or_as_escapes(text: str, encoding: str) -> None:
    shown = printable(text, encoding)
    assert is_shown(shown, encoding)
    if is_shown(text) and text.isascii():
        assert shown == text
    if "\\" not in text:
        back = json.loads(f'"{shown}"'.replace("\n", "\\n").replace("\t", "\\t")) if '"' not in text else text
        assert back.encode("utf-16", "surrogatepass") == text.encode("utf-16", "surrogatepass")


@settings(max_examples=30)
@example(text="\ud83d", encoding="utf-8")
@example(text="–", encoding="latin-1")
@given(text=texts, encoding=encodings)
def test_lines_errors_and_tables_pass(text: str, encoding: str) -> None:
    with written(encoding) as out, written(encoding, "stderr") as err:
        echo(text)
        print_error(text)
        show_table([escape(text), "b"], [["1", escape(text)]])
        table = Table("–", title=Text(text))
        table.add_column(Text(text))
        table.add_row(Text(text), escape(text))
        Terminal(width=40).print(table, text, markup=False)
    assert is_shown(out(), encoding)
    assert is_shown(err(), encoding)


PRINTS = re.compile(
    r"(print|(typer|click)\.(s?echo|prompt|confirm)|rich\.print|Console|sys\.(__)?std(out|err)(__)?(\.buffer)?\.write(lines)?"
    r"|traceback\.print_\w+|faulthandler\.dump_\w+|os\.write)"
)
ELSEWHERE = {
    "cli/after_run.py: sys.stdout.write('\\x1b[2J\\x1b[H')",
    "cli/config.py: sys.stdout.write(dump_diff(config) if diff else dump_resolved(config))",  # YAML
    "cli/new_run.py: typer.prompt(printable(question), default=default)",
    "runtime/text.py: stream.write(printable(text, stream.encoding) + '\\n')",
    "runtime/torchrun.py: sys.stdout.write('\\x1b[?25h')",
    "tasks/reward/run_tests.py: os.write(replies, f'{key} {what}\\n'.encode())",
    "weights/storage/stored.py: os.write(handle, data)",
}
"""They print escapes of their own, or to no terminal."""


def test_no_module_prints_another_way() -> None:
    package, calls = Path(tepo_megatron.__file__).parent, set[str]()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)):
                files = [ast.unparse(word) for word in node.keywords if word.arg == "file"]
                to_pipe = name == "print" and files and not re.search("std(out|err)", files[0])
                if (PRINTS.fullmatch(name) and not to_pipe) or name == "stream.write":
                    calls.add(f"{path.relative_to(package)}: {ast.unparse(node)}")
    assert calls == ELSEWHERE


@pytest.mark.parametrize("kind", ["plain", "live"])
@given(text=texts, encoding=encodings)
def test_progress_passes(kind: Any, text: str, encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding, write_through=True)
    progress = make_progress(LogConfig(progress=kind), stream)
    progress.message(text)
    progress.close()
    assert is_shown(stream.buffer.getvalue().decode(encoding), encoding)


@settings(max_examples=30)
@given(value=values, encoding=encodings)
def test_json_for_tools_stays_what_it_was(value: Any, encoding: str) -> None:
    with written(encoding) as out:
        print_json(value)
    assert is_shown(out(), encoding)
    assert json.dumps(json.loads(out())) == json.dumps(json.loads(json.dumps(value)))


SAMPLE = st.fixed_dictionaries(
    {"problem": texts, "prompt": texts, "answer": texts},
    optional={
        "source": texts,
        "set": texts,
        "greedy": st.fixed_dictionaries(
            {"response": texts, "reward": st.floats(0, 1), "tokens": st.integers(0, 9)},
            optional={"components": st.dictionaries(texts, st.floats(0, 1), max_size=2), "error": texts},
        ),
    },
)


@settings(max_examples=20)
@given(rows=st.lists(SAMPLE, min_size=1, max_size=2))
def test_samples_command_no_terminal(rows: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "samples.jsonl"
    path.write_text("".join(json.dumps({"step": 1, **row}) + "\n" for row in rows))
    assert is_shown(invoke("samples", path).stdout)


@settings(max_examples=20)
@given(name=texts.filter(bool), value=st.floats(allow_nan=False, width=32))
def test_metrics_take_any_name(name: str, value: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("metrics")
    with closing(MetricsWriter(folder, tensorboard=True)) as metrics:
        metrics.write(1, {name: value})
    (row,) = read_metrics(folder / "metrics.jsonl")
    assert [key.encode("utf-16", "surrogatepass") for key in row if key != "step"] in (
        [name.encode("utf-16", "surrogatepass")],
        [],
    )


@given(value=values)
def test_loggers_are_sent_valid_text(value: Any) -> None:
    json.dumps(without_secrets(value), ensure_ascii=False).encode()


@given(text=texts)
def test_valid_text_changes_only_surrogates(text: str) -> None:
    shown = valid_text(text)
    shown.encode()
    without = "".join(item for item in text if not "\ud800" <= item <= "\udfff")
    if without == text:
        assert shown is text
    else:
        assert all(surrogate not in shown for surrogate in SURROGATES)
