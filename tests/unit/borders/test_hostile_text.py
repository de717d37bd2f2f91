"""What texts become: tokens, lines on a terminal, JSON of commands; and files whose names or texts are no UTF-8 are refused.
``test_fuzz.py`` feeds hostile values to every border.
"""

import ast
import io
import json
import random
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.table import Table

import tepo_megatron
from tepo_megatron.cli.console import print_json
from tepo_megatron.config import RunConfig
from tepo_megatron.config.data import SourceConfig
from tepo_megatron.config.reward import EnvironmentConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.runtime.terminal import Terminal
from tepo_megatron.runtime.text import printable, valid_text
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import encode_prompt, load_problems
from tepo_megatron.tasks.data.tokenizer import Tokenizer, load_tokenizer
from tepo_megatron.tasks.environments.agent_session import ChatRequest
from tepo_megatron.tasks.environments.environment_task import EnvironmentTask
from tepo_megatron.tasks.environments.episodes import Observations
from tepo_megatron.tasks.reward.recorded import read_recorded
from tepo_megatron.tools.faults.hostile import SPECIAL, SURROGATES, chat_tokenizer, is_shown
from tests.support import hostile_environment
from tests.support.cli import invoke
from tests.support.episodes import FakeSamples
from tests.support.hostile import texts, valid_texts, values


@pytest.fixture(scope="module")
def chat() -> Tokenizer:
    return chat_tokenizer()


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return load_tokenizer(resolve_model_path("builtin:tiny"))


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


def test_a_line_separator_within_json_ends_no_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "q", "answer": "a", "response": "\u2028"}\n')
    assert len(read_recorded(tmp_path / "a.jsonl")) == 1


class TestSpecialTokens:
    @settings(max_examples=20)
    @given(text=valid_texts)
    def test_names_in_a_text_are_characters_unless_tokens_are_asked_for(self, text: str, chat: Tokenizer) -> None:
        said = ["chat", vars(ChatRequest(({"role": "user", "content": text},), begins=False))]
        plain = Observations(chat, chat.vocab_size, chat_template=False).ids(said, ended=True).tolist()
        told = Observations(chat, chat.vocab_size).ids(["text", text], ended=True).tolist()
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


encodings = st.sampled_from(("utf-8", "latin-1", "ascii"))


@given(text=texts, encoding=encodings)
def test_a_text_prints_as_it_is_or_as_escapes(text: str, encoding: str) -> None:
    shown = printable(text, encoding)
    assert is_shown(shown, encoding)
    if is_shown(text) and text.isascii():
        assert shown == text
    if "\\" not in text:
        back = json.loads(f'"{shown}"'.replace("\n", "\\n").replace("\t", "\\t")) if '"' not in text else text
        assert back.encode("utf-16", "surrogatepass") == text.encode("utf-16", "surrogatepass")


PRINTS = re.compile(
    r"((typer|click)\.(s?echo|prompt|confirm)|(sys\.(__)?std(out|err)(__)?(\.buffer)?|stream)\.write(lines)?"
    r"|traceback\.print_\w+|faulthandler\.dump_\w+|os\.write)"
)
"""Ruff finds ``print`` (T20) and rich's own (TID251)."""

ELSEWHERE = {
    "cli/after_run.py: sys.stdout.write('\\x1b[2J\\x1b[H')",
    "cli/config.py: sys.stdout.write(dump_diff(config) if diff else dump_resolved(config))",  # YAML
    "cli/new_run.py: typer.prompt(printable(question), default=default)",
    "runtime/text.py: stream.write(printable(text, stream.encoding) + end)",
    "runtime/torchrun.py: sys.stdout.write('\\x1b[?25h')",
    "tasks/reward/run_tests.py: os.write(replies, f'{key} {what}\\n'.encode())",
    "tools/faults/episode_borders.py: os.write(file, answer)",
    "tools/faults/processes.py: os.write(self._end, keys.encode())",
    "weights/storage/stored.py: os.write(handle, data)",
}
"""They print escapes of their own, or to no terminal."""


def test_no_module_prints_another_way() -> None:
    package, calls = Path(tepo_megatron.__file__).parent, set[str]()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and PRINTS.fullmatch(ast.unparse(node.func)):
                calls.add(f"{path.relative_to(package)}: {ast.unparse(node)}")
    assert calls == ELSEWHERE


@settings(max_examples=30)
@given(value=values, encoding=encodings)
def test_json_for_tools_stays_what_it_was(value: Any, encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding, write_through=True)  # refuses what the encoding does not have
    with redirect_stdout(stream):
        print_json(value)
    written = stream.buffer.getvalue().decode(encoding)
    assert is_shown(written, encoding)
    assert json.dumps(json.loads(written)) == json.dumps(json.loads(json.dumps(value)))


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


@given(text=texts)
def test_valid_text_changes_only_surrogates(text: str) -> None:
    shown = valid_text(text)
    shown.encode()
    without = "".join(item for item in text if not "\ud800" <= item <= "\udfff")
    if without == text:
        assert shown is text
    else:
        assert all(surrogate not in shown for surrogate in SURROGATES)


@given(text=st.text(st.characters(categories=["Cc", "Cf"], exclude_characters="\n\t"), min_size=1, max_size=9))
def test_a_table_shows_all_of_a_text_with_control_characters(text: str) -> None:
    console = Terminal(file=io.StringIO(), width=200)
    table = Table("name")
    table.add_row(text)
    console.print(table)
    assert f"│ {printable(text, console.encoding)}" in console.file.getvalue()  # type: ignore[attr-defined]
