"""What a run takes of its sources: names, ids, filters, and what is left out and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config.data import DataConfig
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.sources import FILTER, TOO_LONG, Source, read_sources
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tests.support.data_files import write_jsonl, write_parquet

TINY = load_tokenizer(resolve_model_path("builtin:tiny"))


def read(**given: Any) -> list[Source]:
    return read_sources(DataConfig.model_validate({"heldout": None, **given}), "train", TINY)


def rows(*prompts: str, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "answer": "1", **more} for prompt in prompts]


def test_each_source_is_read_in_its_own_way_or_the_common_one(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", rows("1+1", "22"))
    two = write_parquet(tmp_path / "two.parquet", [{"question": "33", "answer": "3"}])
    sources = [{"path": one}, {"path": two, "name": "other", "fields": {"prompt": "question"}, "template": "{prompt}="}]
    first, second = read(train=sources, template="a{prompt}", max_prompt_tokens=4)
    assert (first.name, second.name) == ("one", "other")
    assert [problem.prompt for problem in (*first.used, *second.used)] == ["a22", "33="]
    assert [(prompt.tokens, prompt.left_out) for prompt in first.prompts] == [(5, TOO_LONG), (4, None)]  # with the begin token
    assert first.notices == [f"{one}: 1 problem left out, longer than data.max_prompt_tokens"]
    plain, *none = read(train=one)
    assert not none
    assert (plain.name, [problem.id for problem in plain.used]) == ("", ["one:1", "one:2"])


def test_filters_and_their_counts(tmp_path: Path) -> None:
    own = tmp_path / "keeps.py"
    own.write_text(
        "def short(problem):\n    return len(problem.prompt) < 3\n\ndef vague(problem):\n    return 1\n\n"
        "def broken(problem):\n    return problem.grade\n"
    )
    path = write_jsonl(tmp_path / "a.jsonl", [*rows("1", "22", "1", "333"), {"prompt": "4", "answer": "none"}])
    (found,) = read(train=path, filter=["unique", "number", f"{own}:short"])
    assert [problem.prompt for problem in found.used] == ["1", "22"]
    assert found.left_out == {f"{FILTER} unique": 1, f"{FILTER} number": 1, f"{FILTER} short": 1}
    assert set(found.notices) == {
        f"{path}: 1 problem left out, refused by the filter {name}" for name in ("unique", "number", "short")
    }
    for name, message in (
        ("vague", r"the filter vague \(data\.filter\) returned 1 for problem 'a:1'; return True to keep it, or False"),
        ("broken", r"the filter broken \(data\.filter\) raised AttributeError on problem 'a:1'"),
        ("nothing", "has no function nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            read(train=path, filter=[f"{own}:{name}"])
    none = write_jsonl(tmp_path / "none.jsonl", [{"prompt": "4", "answer": "none"}])
    with pytest.raises(ValueError, match=r"none of the 1 problems of \S+none\.jsonl is left: 1 refused by the filter number"):
        read(train=[{"path": path}, {"path": none}], filter=["number"])
    with pytest.raises(
        ValueError, match=r"max_prompt_tokens = 1 leaves no problem of \S+none\.jsonl: the shortest of 1 .* 2 tok"
    ):
        read(train=none, max_prompt_tokens=1)


def test_two_sources_with_the_same_id_are_refused_unless_they_have_names(tmp_path: Path) -> None:
    one, two = (write_jsonl(tmp_path / name / f"{name}.jsonl", rows("1", id="x")) for name in ("one", "two"))
    with pytest.raises(ValueError, match=rf"the id 'x' is in {one} and in {two}, .*; give the sources names"):
        read(train=[{"path": one}, {"path": two}])
    first, second = read(train=[{"path": one, "name": "a"}, {"path": two, "name": "b"}])
    assert [problem.id for problem in (*first.used, *second.used)] == ["a/x", "b/x"]
    assert [problem.source for problem in (*first.used, *second.used)] == ["a", "b"]


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}])
    with pytest.raises(ValueError, match=r"problem 'a:1' cannot be encoded: the model's tokenizer has no chat temp"):
        read(train=path)
    plain = write_jsonl(tmp_path / "b.jsonl", rows("1+1="))
    with pytest.raises(ValueError, match=r"problem 'b:1' cannot be encoded: .*chat_template = true need"):
        read(train=plain, chat_template=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train": []}, "the list of sources is empty"),
        ({"train": [{"path": "a/x.jsonl"}, {"path": "b/x.jsonl"}]}, "two sources are called x, .* give each a name of its own"),
        ({"train": [{"path": "a", "name": "1/2"}]}, "a source's name begins with a letter"),
        ({"train": [{"path": "a", "weight": 0}]}, "greater than 0"),
        ({"train": [{"path": "a", "filter": ["short"]}]}, r"'short' is no filter; known: unique, number, or your own"),
        ({"train": [{"path": "a", "verifier_kwargs": {"x": 1}}]}, "are for this source's own verifier"),
        ({"order": "hardest"}, r"'hardest' is no order; known: shuffled, as_given, shortest_first, or your own"),
        ({"template": "Answer:"}, "the template has no {column} in it"),
        ({"template": "{{prompt}}"}, "the template has no {column} in it"),
    ],
)
def test_sources_that_cannot_be_meant(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate({"heldout": None, **given})


def test_a_source_is_called_by_its_file() -> None:
    for path, split, name in (
        ("d/my set (1).jsonl", None, "myset1"),
        ("d/42.parquet", None, "source"),
        ("hub/gsm8k", "train", "gsm8k-train"),
        ("builtin:addition", None, "addition"),
    ):
        (source,) = DataConfig.model_validate({"train": [{"path": path, "split": split}], "heldout": None}).train_sources
        assert source.called == name


def test_paths_are_named_by_their_field_and_can_be_moved() -> None:
    data = DataConfig.model_validate({"train": [{"path": "a"}, {"path": "b", "weight": 2}], "heldout": "c"})
    assert data.paths == {"data.train[0].path": "a", "data.train[1].path": "b", "data.heldout": "c"}
    moved = data.with_paths({field: f"/disk/{path}" for field, path in data.paths.items()})
    assert list(moved.paths.values()) == ["/disk/a", "/disk/b", "/disk/c"]
    assert [source.weight for source in moved.train_sources] == [1, 2]
    assert DataConfig(heldout=None).with_paths({"data.train": "x"}).paths == {"data.train": "x"}
