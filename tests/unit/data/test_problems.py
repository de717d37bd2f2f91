import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.problems import load_problems

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


def _write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@given(st.lists(st.tuples(words, words), min_size=1, max_size=5), st.booleans())
def test_json_lines_round_trip(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], escape: bool) -> None:
    """Any text survives, also with line separators that only Python's splitlines knows (written unescaped)."""
    lines = [json.dumps({"prompt": p, "answer": a, "id": f"x{i}"}, ensure_ascii=escape) for i, (p, a) in enumerate(pairs)]
    source = _write(tmp_path_factory.mktemp("data") / "set.jsonl", "\n".join(lines))
    assert load_problems(source) == [Problem(f"x{i}", p, a) for i, (p, a) in enumerate(pairs)]


def test_ids_come_from_the_line_and_numbers_stay_as_written(tmp_path: Path) -> None:
    text = '\ufeff{"prompt": "a", "answer": 1.50, "level": 3}\r\n\n  \n{"prompt": "b", "answer": 12, "id": 7}\n'
    assert load_problems(_write(tmp_path / "set.jsonl", text)) == [Problem("set:1", "a", "1.50"), Problem("7", "b", "12")]


def test_other_keys_are_kept_for_verifiers_as_json_has_them(tmp_path: Path) -> None:
    """Numbers in them are numbers; the answer stays as it was written."""
    extra = '"level": 3, "share": 0.5, "tests": ["x", {"y": null}]'
    text = f'{{"prompt": "a", "answer": 1.50, {extra}, "id": 4}}\n{{"prompt": "b", "answer": "c"}}'
    first, second = load_problems(_write(tmp_path / "set.jsonl", text))
    assert first.metadata == {"level": 3, "share": 0.5, "tests": ["x", {"y": None}]}
    assert (first.id, first.answer) == ("4", "1.50")
    assert second.metadata == {}


GOOD = '{"prompt": "p", "answer": "a", "id": "one"}\n'


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"prompt": "", "answer": "a"}', "'prompt' is empty"),
        ('{"prompt": "  \\n", "answer": "a"}', "'prompt' is empty"),
        ('{"prompt": "p", "answer": " "}', "'answer' is empty"),
        ('{"prompt": "p", "solution": "a"}', "'answer' is missing .*prompt, solution"),
        ('{"prompt": "p", "answer": null}', "'answer' is missing"),
        ('{"prompt": ["p"], "answer": "a"}', "'prompt' must be text"),
        ('{"prompt": "p", "answer": true}', "'answer' must be text, not true"),
        ('{"prompt": "p", "answer": "a", "id": ""}', "'id' is empty"),
        ('["p", "a"]', "not a JSON object"),
        ("prompt,answer", "not JSON: .* column 1"),
        ('{"prompt": "p", ', "not JSON"),
        ('{"prompt": "q", "answer": "b", "id": "one"}', "'one' was used before, in .*:1; ids"),
        (b'{"prompt": "\xff", "answer": "a"}', r"not UTF-8 text \(byte 13 of the line\)"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, bad: str | bytes, message: str) -> None:
    path = tmp_path / "set.jsonl"
    source = _write(path, GOOD.encode() + b"\n" + (bad if isinstance(bad, bytes) else bad.encode()) + b"\n")
    with pytest.raises(ValueError, match=message) as error:
        load_problems(source)
    assert str(error.value).startswith(f"{path}:3: ")


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl does not exist"):
        load_problems(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="is a folder"):
        load_problems(str(tmp_path))
    with pytest.raises(ValueError, match=r"set\.jsonl has no problem in it"):
        load_problems(_write(tmp_path / "set.jsonl", "\n \n"))


def test_unknown_builtin_names_the_known_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"known: builtin:addition, builtin:addition-heldout, .*; did you mean builtin:add"):
        load_problems("builtin:adition")
    with pytest.raises(
        ValueError,
        match=r"known: builtin:addition, builtin:addition-heldout, builtin:guess-number, builtin:guess-number-heldout, "
        r"builtin:stack-machine, builtin:stack-machine-heldout$",
    ):
        load_problems("builtin:zzz")
    with pytest.raises(ValueError, match="did you mean builtin:addition"):
        load_problems("addition")
