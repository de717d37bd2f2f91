"""The same problems from JSON lines, CSV, Parquet and a folder of ``datasets``; columns by other names, templates, messages."""

import json
import shutil
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.data import SourceConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.problems import load_problems
from tests.support.data_files import save_to_disk, write_csv, write_jsonl, write_parquet

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "answer": "2", "id": "one", "level": 3, "tags": ["a", "b"], "of": {"book": "x"}},
    {"prompt": "1+2=", "answer": "3", "id": "two", "level": None, "tags": [], "of": {"book": None}},
]
words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8).filter(str.strip)
any_words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


def source(path: str | Path, **given: Any) -> SourceConfig:
    return SourceConfig.model_validate({"path": str(path), **given})


def beside(problems: list[Problem]) -> list[dict[str, Any]]:
    return [dict(problem.metadata) for problem in problems]


def test_every_format_gives_the_same_problems(tmp_path: Path) -> None:
    expected = load_problems(write_jsonl(tmp_path / "a.jsonl", ROWS))
    assert beside(expected)[0] == {"level": 3, "tags": ["a", "b"], "of": {"book": "x"}}
    hub = tmp_path / "hub"
    write_parquet(hub / "data" / "train-00000-of-00002.parquet", ROWS[:1])
    write_parquet(hub / "data" / "train-00001-of-00002.parquet", ROWS[1:])
    write_parquet(hub / "data" / "test-00000-of-00002-7320a6f3aba8ebd2.parquet", ROWS[:1])
    write_parquet(hub / "data" / "test-00001-of-00002-e7bd1a30b0a1c954.parquet", ROWS[1:])
    write_parquet(hub / "data" / "dev-00000-of-00003.parquet", ROWS[:1])  # not whole, and not asked for
    shutil.copy(write_parquet(tmp_path / "other.parquet", ROWS), tmp_path / "no_suffix")
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    for each in (
        source(write_parquet(tmp_path / "a.parquet", ROWS, row_group=1)),
        source(tmp_path / "no_suffix"),
        source(save_to_disk(tmp_path / "saved", ROWS, shards=2)),
        source(save_to_disk(tmp_path / "splits", {"train": ROWS, "test": ROWS[1:]}), split="train"),
        source(save_to_disk(tmp_path / "one_split", {"train": ROWS})),
        source(hub, split="train"),
        source(hub, split="test"),
        source(tmp_path / "a.json"),
    ):
        found = load_problems(each)
        assert found == expected, each
        assert beside(found) == beside(expected)


@given(delimiter=st.sampled_from(",;\t"), rows=st.lists(st.tuples(words, words), min_size=1, max_size=5))
def test_any_text_survives_csv(tmp_path_factory: pytest.TempPathFactory, delimiter: str, rows: list[tuple[str, str]]) -> None:
    """Also with quotes, delimiters and line breaks in it; every problem is called by the line that it begins in."""
    folder = tmp_path_factory.mktemp("data")
    named = [{"prompt": f"{p}\n,;", "answer": a, "level": "1.50"} for p, a in rows]
    found = load_problems(write_csv(folder / "set.csv", named, delimiter))
    assert found == [Problem(f"set:{2 + 2 * at}", f"{p}\n,;", a) for at, (p, a) in enumerate(rows)]
    assert found[0].metadata == {"level": "1.50"}
    for split in ("train", "test"):
        write_csv(folder / "hub" / f"{split}.csv", named, delimiter)
    in_folder = load_problems(source(folder / "hub", split="test"))
    assert [(each.prompt, each.answer) for each in in_folder] == [(each.prompt, each.answer) for each in found]


GOOD = '{"prompt": "p", "answer": "a", "id": "one"}\n'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("csv", "prompt,answer\n1+1=,2,3\n", r":2: 3 columns, and the first line names 2 \(prompt, answer\); put text"),
        ("csv", "prompt,answer\n\n1+1=\n", ":3: 1 columns, and the first line names 2"),
        ("csv", "prompt,prompt\n1,2\n", ":1: the first line of a CSV file names each column once; this one has"),
        ("csv", 'prompt,answer\n"1,2\n', ":2: not CSV: .*; JSON lines or Parquet take any text"),
        ("csv", b"prompt,answer\n\xff,2\n", r": not UTF-8 text \(byte 15\); save the file as UTF-8"),
        ("csv", b"prompt,answer\n" + b"1,2\n" * 5000 + b"\xff,2\n", r": not UTF-8 text \(byte 20015\)"),
        ("csv", "prompt,answer\n", " has no problem in it"),
        ("csv", "question,answer\n1,2\n", r":2: 'prompt' is missing .*, answer.* such as data\.fields\.prompt=question"),
        ("json", '[{"prompt": "x", "answer": "y"}, 3]', ", row 2: not a JSON object"),
        ("json", '[{"prompt": "x",\n "answer": }]', ": not JSON: .* at line 2, column 12"),
        ("json", '[{"question": "x", "answer": 2}]', r", row 1: 'prompt' is missing .*data\.fields\.prompt=question"),
        ("jsonl", "\n \n", " has no problem in it"),
        ("jsonl", f'{GOOD}\n{{"prompt": "p", "solution": "a"}}', r":3: 'answer' is missing .*data\.fields\.answer=solution"),
        ("jsonl", '{"prompt": "  \\n", "answer": "a"}', ":1: 'prompt' is empty"),
        ("jsonl", '{"prompt": "p", "answer": " "}', ":1: 'answer' is empty"),
        ("jsonl", '{"prompt": "p", "answer": null}', ":1: 'answer' is null or NaN$"),
        ("jsonl", '{"prompt": "p", "answer": NaN}', ":1: 'answer' is null or NaN$"),
        ("jsonl", '{"prompt": "p"}', r":1: 'answer' is missing \(the keys are: prompt\)$"),
        ("jsonl", '{"prompt": "p", "the (b)": "x"}', r":1: .* such as 'data\.fields\.answer=the \(b\)'$"),
        ("jsonl", '{"prompt": "p", "answer": {"value": 1}}', r":1: .*}; .* such as data\.fields\.answer=answer\.value$"),
        ("jsonl", '{"prompt": "p", "answer": true}', ":1: 'answer' must be text, not true"),
        ("jsonl", '{"prompt": "p", "answer": "a", "id": ""}', ":1: 'id' is empty"),
        ("jsonl", '["p", "a"]', ":1: not a JSON object"),
        ("jsonl", "prompt,answer", ":1: not JSON: .* column 1"),
        ("jsonl", f"{GOOD}{GOOD}", ":2: the id 'one' was used before, in .*:1; ids must differ"),
        ("jsonl", b'{"prompt": "\xff", "answer": "a"}', r":1: not UTF-8 text \(byte 13 of the line\)"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    path = tmp_path / f"a.{name}"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=rf"a\.{name}{message}"):
        load_problems(str(path))


@given(st.lists(st.tuples(any_words, any_words), min_size=1, max_size=5), st.booleans())
def test_any_text_survives_json_and_parquet(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], escape: bool
) -> None:
    """Also with line separators that only Python's splitlines knows, written unescaped."""
    rows = [{"prompt": p, "answer": a, "id": f"x{at}"} for at, (p, a) in enumerate(pairs)]
    path = tmp_path_factory.mktemp("data") / "set.jsonl"
    path.write_bytes("\n".join(json.dumps(row, ensure_ascii=escape) for row in rows).encode())
    expected = [Problem(f"x{at}", p, a) for at, (p, a) in enumerate(pairs)]
    assert load_problems(str(path)) == load_problems(write_parquet(path.with_suffix(".parquet"), rows)) == expected


def test_ids_come_from_the_line_and_numbers_stay_as_written_but_not_in_metadata(tmp_path: Path) -> None:
    first, second = '{"prompt": "a", "answer": 1.50, "level": 3}', '{"prompt": "b", "answer": 12, "id": 7, "x": [{"y": 5}]}'
    (tmp_path / "set.jsonl").write_bytes(f"\ufeff{first}\r\n\n  \n{second}\n".encode())
    found = load_problems(str(tmp_path / "set.jsonl"))
    assert found == [Problem("set:1", "a", "1.50"), Problem("7", "b", "12")]
    assert beside(found) == [{"level": 3}, {"x": [{"y": 5}]}]


def test_numbers_and_other_values_of_parquet_become_those_of_json(tmp_path: Path) -> None:
    row = {"prompt": "q", "answer": 95, "id": 7, "day": date(2026, 1, 2), "price": Decimal("1.50"), "picture": b"\x89PNG"}
    (found,) = load_problems(write_parquet(tmp_path / "a.parquet", [row]))
    assert (found.answer, found.id) == ("95", "7")
    assert found.metadata == {"day": "2026-01-02", "price": "1.50"}  # raw bytes are left out
    (half,) = load_problems(write_parquet(tmp_path / "b.parquet", [{"prompt": "q", "answer": 4.5}]))
    assert (half.answer, half.id) == ("4.5", "b:1")


def test_columns_by_other_names_also_within_others(tmp_path: Path) -> None:
    rows = [{"question": "1+1=", "reward_model": {"ground_truth": "2", "style": "rule"}, "uid": "u1", "prompt_id": 3}]
    fields = {"prompt": "question", "answer": "reward_model.ground_truth", "id": "uid"}
    for path in (write_jsonl(tmp_path / "a.jsonl", rows), write_parquet(tmp_path / "a.parquet", rows)):
        assert load_problems(source(path, fields=fields)) == [Problem("u1", "1+1=", "2")]


def test_a_template_makes_the_prompt_of_any_columns(tmp_path: Path) -> None:
    rows = [{"question": "1+1", "unit": {"name": "apples"}, "answer": 2, "level": 3, "parts": [1, 0.5, "2"]}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    fields = {"prompt": "question"}
    text = "{prompt} in {unit.name} ({level}) of {parts}, \\boxed{} {{question}}:\n"
    (found,) = load_problems(source(path, fields=fields, template=text))
    assert found.prompt == '1+1 in apples (3) of [1, 0.5, "2"], \\boxed{} {question}:\n'
    assert found.metadata["question"] == "1+1"  # what the prompt was made of
    (tmp_path / "numbers.json").write_text(json.dumps([{"answer": 2, "parts": [1, 3]}]))
    for each in (tmp_path / "numbers.json", write_parquet(tmp_path / "b.parquet", [{"answer": 2, "parts": [1, 3]}])):
        assert load_problems(source(each, fields={"prompt": "parts"}, template="{prompt}"))[0].prompt == "[1, 3]"
    (built_in, *_) = load_problems(source("builtin:addition-heldout", template="Q: {prompt} A:", name="sums"))
    assert built_in.prompt.startswith("Q: ")
    assert built_in.id.startswith("sums/")
    lacking = write_parquet(tmp_path / "c.parquet", [{"answer": 2.5, "level": float("nan")}])
    with pytest.raises(ValueError, match=r"the template has \{level\}, which is missing or empty"):
        load_problems(source(lacking, template="{level}"))
    with pytest.raises(ValueError, match="row 1: 'level' is null or NaN"):
        load_problems(source(lacking, fields={"prompt": "answer", "answer": "level"}))
    with pytest.raises(ValueError, match=r"a\.jsonl:1: the template has \{nothing\}, .* \(the keys are: question, unit, ans"):
        load_problems(source(path, template="{nothing}"))


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def test_messages_and_system_prompts(tmp_path: Path) -> None:
    rows = [{"messages": CHAT, "answer": "2"}, {"messages": CHAT[1:], "answer": "2"}]
    pairs = tuple((each["role"], each["content"]) for each in CHAT)
    verl = [{"prompt": CHAT, "answer": "2"}]
    for path in (write_jsonl(tmp_path / "a.jsonl", rows), write_parquet(tmp_path / "a.parquet", rows)):
        first, second = load_problems(source(path, system_prompt="Think."))
        assert (first.prompt, first.messages) == ("1+1?", pairs)  # its own system message stays
        assert second.messages == (("system", "Think."), pairs[1])
    (found,) = load_problems(source(write_parquet(tmp_path / "verl.parquet", verl)))
    assert found.messages == pairs
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"prompt": "1+1?", "answer": "2"}])
    (wrapped,) = load_problems(source(plain, chat_template=True, system_prompt="Think.", template="{prompt}!"))
    assert wrapped.messages == (("system", "Think."), ("user", "1+1?!"))
    assert load_problems(source(plain, system_prompt=""))[0].messages == ()
    named = load_problems(source(plain, name="mine"))
    assert [problem.id for problem in named] == ["mine:1"]


@pytest.mark.parametrize(
    ("row", "given", "message"),
    [
        ({"messages": "hello"}, {"fields": {"messages": "messages"}}, "'messages' must be a list of messages"),
        ({"messages": []}, {}, "'messages' must be a list of messages"),
        ({"messages": ["hello"]}, {}, r"messages\[0\] is no message with role and content"),
        ({"messages": [{"role": "teacher", "content": "x"}]}, {}, r"has the role \"teacher\"; a role is one of system, user"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, {}, r"content of messages\[0\] must be text"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, {}, "has tool_calls beside role and content"),
        ({"messages": [*CHAT, {"role": "assistant", "content": "2"}]}, {}, "the last message of 'messages' is the assistant's"),
        ({"messages": CHAT}, {"template": "{prompt}:"}, "a template is for prompts that are text, and 'messages' has messages"),
        ({"prompt": "x"}, {"fields": {"messages": "talk"}}, r"'talk' is missing \(the keys are: prompt, answer\)"),
        ({"prompt": "x"}, {"system_prompt": "Think."}, "a plain prompt has no place for it; set chat_template = true"),
        ({"prompt": ["x"]}, {}, "'prompt' must be text"),
        ({"prompt": None}, {"template": "{prompt}:"}, r"the template has \{prompt\}, which is missing or empty"),
    ],
)
def test_what_is_no_prompt_is_named_with_file_and_line(
    tmp_path: Path, row: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{**row, "answer": "2"}])
    with pytest.raises(ValueError, match=message) as caught:
        load_problems(source(path, **given))
    assert str(caught.value).startswith(f"{path}:1: ")


def test_names_folders_and_files_that_cannot_be_read(tmp_path: Path) -> None:
    twice = write_parquet(tmp_path / "a.parquet", [{"prompt": "q", "answer": "a", "id": "x"}] * 2)
    splits = save_to_disk(tmp_path / "splits", {"train": ROWS, "test": ROWS})
    saved = save_to_disk(tmp_path / "saved", ROWS)
    cut = Path(write_parquet(tmp_path / "cut.parquet", ROWS))
    cut.write_bytes(cut.read_bytes()[:-20])
    lost = Path(save_to_disk(tmp_path / "lost", ROWS))
    (lost / "data-00000-of-00001.arrow").unlink()
    damaged = Path(save_to_disk(tmp_path / "damaged", ROWS))
    (damaged / "data-00000-of-00001.arrow").write_bytes(b"nothing")
    (tmp_path / "empty").mkdir()
    for name in ("main", "socratic"):
        (tmp_path / "inner" / name).mkdir(parents=True)
        write_parquet(tmp_path / "inner" / name / "train-00000-of-00001.parquet", ROWS)
    sets = {"gap": ("0-of-3", "2-of-3"), "mixed": ("0-of-1", "0-of-2", "1-of-2"), "twice": ("0-of-2-" + "a" * 16, "0-of-2")}
    for name, files in sets.items():
        for file in files:
            write_parquet(tmp_path / name / f"train-{file}.parquet", ROWS)
    for each, message in (
        (twice, rf"^{twice}, row 2: the id 'x' was used before, in {twice}, row 1; ids must differ"),
        (str(tmp_path / "none.jsonl"), r"none\.jsonl does not exist"),
        ("addition", "did you mean builtin:addition"),
        ("builtin:adition", "known: builtin:addition, builtin:addition-heldout, .*; did you mean builtin:addition"),
        (source(splits), "has the splits train, test; say which one: .*split: train"),
        (source(splits, split="dev"), "has no split dev; it has train, test"),
        (source(saved, split="train"), "has no split train; it has none: leave it out"),
        (source(cut, split="train"), r"cut\.parquet has no split train; it has none"),
        (source(cut), r"cut\.parquet cannot be read as Parquet: "),
        (source(lost), r"is not whole: .*data-00000-of-00001\.arrow is missing; copy it again"),
        (source(damaged), r"data-00000-of-00001\.arrow cannot be read as Arrow: "),
        (source(tmp_path / "inner"), "has its files in the folders main, socratic; add one to the path: …/main"),
        (source(tmp_path / "gap"), r"is not whole, or .*: 2 of train, the last is train-2-of-3\.parquet; download it again"),
        (source(tmp_path / "mixed"), r"files of two: 3 of train, the last is train-1-of-2\.parquet"),
        (source(tmp_path / "twice"), "files of two: 2 of train, "),
        (source(tmp_path / "empty"), "is a folder without a data set: neither dataset_dict.json nor state.json"),
    ):
        with pytest.raises(ValueError, match=message):
            load_problems(each)
