"""Any string is printed and logged, and no text acts on the terminal."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from tepo_megatron.cli.console import print_json, show_table
from tepo_megatron.cli.main import app
from tepo_megatron.config import LogConfig
from tepo_megatron.run.display.progress import Terminal, make_progress
from tepo_megatron.run.loggers import without_secrets
from tepo_megatron.run.metrics import MetricsWriter, read_metrics
from tepo_megatron.runtime.rank import print_error
from tepo_megatron.runtime.text import echo, printable, valid_text
from tests.support.hostile import SURROGATES, is_shown, texts, values

ENCODINGS = ("utf-8", "latin-1", "ascii")

encodings = st.sampled_from(ENCODINGS)

runner = CliRunner()


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
        show_table([escape(text), "b"], [["1", escape(text)]], title=escape(text))
        table = Table("–", title=Text(text))
        table.add_column(Text(text))
        table.add_row(Text(text), escape(text))
        Terminal(width=40).print(table, text, markup=False)
    assert is_shown(out(), encoding)
    assert is_shown(err(), encoding)


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
    done = runner.invoke(app, ["samples", str(path)])
    assert done.exit_code == 0, done.output
    assert is_shown(done.stdout)


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
