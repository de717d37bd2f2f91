"""What a run takes of its sources: names, ids, filters, what is left out and why; and the order of problems: the quota of each
source, a restored state, and orders by the user's function.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.data import DataConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.sources import FILTER, TOO_LONG, ProblemSampler, Source
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tests.support.data_files import write_jsonl, write_parquet

TINY = load_tokenizer(resolve_model_path("builtin:tiny"))


def read(**given: Any) -> list[Source]:
    return Source.read_all(DataConfig.model_validate({"heldout": None, **given}), "train", TINY)


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
        "import numpy\ndef short(problem):\n    return numpy.less(len(problem.prompt), 3)\n\n"
        "def vague(problem):\n    return 1\n\n"
        "def broken(problem):\n    return problem.grade\n\ndef leaves(problem):\n    raise SystemExit(0)\n"
    )
    program = tmp_path / "program.py"
    program.write_text("def keep(problem):\n    return True\n\nraise SystemExit(0)\n")
    path = write_jsonl(tmp_path / "a.jsonl", [*rows("1", "22", "1", "333"), {"prompt": "4", "answer": "none"}])
    (found,) = read(train=path, filter=["unique", "number", f"{own}:short"])
    assert [problem.prompt for problem in found.used] == ["1", "22"]
    assert found.left_out == {f"{FILTER} unique": 1, f"{FILTER} number": 1, f"{FILTER} short": 1}
    notice = f"{path}: 1 problem left out, refused by the filter"
    assert set(found.notices) == {f"{notice} unique", f"{notice} number", f"{notice} short"}
    for name, message in (
        ("vague", r"the filter vague \(data\.filter\) returned 1 for problem 'a:1'; return True to keep it, or False"),
        ("broken", r"the filter broken \(data\.filter\) raised AttributeError on problem 'a:1': .* \(/.*/keeps\.py:9\)$"),
        ("leaves", r"the filter leaves \(data\.filter\) raised SystemExit on problem 'a:1': 0"),
        ("nothing", "has no function nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            read(train=path, filter=[f"{own}:{name}"])
    with pytest.raises(ValueError, match=r"cannot be loaded: importing /.*/program\.py raised SystemExit: 0"):
        read(train=path, filter=[f"{program}:keep"])
    none = write_jsonl(tmp_path / "none.jsonl", [{"prompt": "4", "answer": "none"}])
    with pytest.raises(ValueError, match=r"none of the 1 problems of \S+none\.jsonl is left: 1 refused by the filter number"):
        read(train=[{"path": path}, {"path": none}], filter=["number"])
    with pytest.raises(
        ValueError, match=r"max_prompt_tokens = 1 leaves no problem of \S+none\.jsonl: the shortest of 1 .* 2 t"
    ):
        read(train=none, max_prompt_tokens=1)


def test_two_sources_with_the_same_id_are_refused_unless_they_have_names(tmp_path: Path) -> None:
    one, two = (write_jsonl(tmp_path / name / f"{name}.jsonl", rows("1", id="x")) for name in ("one", "two"))
    with pytest.raises(ValueError, match=rf"the id 'x' is in {one} and in {two}, .*; give the sources names"):
        read(train=[{"path": one}, {"path": two}])
    first, second = read(train=[{"path": one, "name": "a"}, {"path": two, "name": "b"}])
    assert [problem.id for problem in (*first.used, *second.used)] == ["a/x", "b/x"]
    assert [problem.source for problem in (*first.used, *second.used)] == ["a", "b"]


def test_rows_of_several_files_have_ids_of_their_own_also_under_a_name(tmp_path: Path) -> None:
    for shard in ("train-00000-of-00002", "train-00001-of-00002"):
        write_jsonl(tmp_path / "set" / f"{shard}.jsonl", rows("1", "2"))
    (source,) = read(train=[{"path": str(tmp_path / "set"), "name": "own"}])
    assert len({problem.id for problem in source.used}) == 4
    assert source.used[0].id == "own/train-00000-of-00002:1"


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


weights = st.lists(st.one_of(st.integers(1, 9), st.sampled_from([0.1, 0.25, 0.7, 2.5])), max_size=5)
sizes = st.integers(1, 7)


def make(shares: list[float], count: int = 5, seed: int = 0, answer: str = "a") -> ProblemSampler:
    """Sources of count, count + 1, … problems; without shares, one file."""
    sources = [{"path": f"s{index}.jsonl", "weight": share} for index, share in enumerate(shares)]
    problems = [
        Problem(f"s{index}/{number}", "q" * (count - number), answer, source=f"s{index}" if shares else "")
        for index in range(len(shares) or 1)
        for number in range(count + index)
    ]
    data = DataConfig.model_validate({"train": sources or "s0.jsonl", "heldout": None})
    return ProblemSampler.of(problems, data, seed)


@given(shares=weights.filter(bool), draws=st.integers(1, 80))
def test_after_any_number_of_draws_each_source_has_its_share_rounded_down_or_up(shares: list[float], draws: int) -> None:
    sampler, total = make(shares), sum(shares)
    counts: Counter[str] = Counter()
    for drawn in range(1, draws + 1):
        counts[sampler.next(1)[0].source] += 1
        for index, share in enumerate(shares):
            assert abs(counts[f"s{index}"] - drawn * share / total) < 1 - 1e-9 or drawn * share % total == 0
    assert sampler.drawn == draws


@given(shares=weights, count=sizes, seed=st.integers(), draws=st.lists(st.integers(0, 30), max_size=8))
def test_each_source_comes_in_its_own_passes_however_it_is_drawn(
    shares: list[float], count: int, seed: int, draws: list[int]
) -> None:
    sampler = make(shares, count, seed)
    drawn = [problem for n in draws for problem in sampler.next(n)]
    assert len(drawn) == sum(draws)
    again = make(shares, count, seed)
    assert [again.problem(number) for number in reversed(range(len(drawn)))] == drawn[::-1]
    assert [again.problem(number) for number in range(0, len(drawn), 3)] == drawn[::3]
    assert again.next(len(drawn)) == drawn
    for index in range(len(shares) or 1):
        ids = [problem.id for problem in drawn if problem.id.startswith(f"s{index}/")]
        for start in range(0, len(ids), count + index):
            epoch = ids[start : start + count + index]
            assert len(set(epoch)) == len(epoch)


@given(shares=weights, count=sizes, before=st.lists(st.integers(0, 40), max_size=3), after=st.integers(0, 20))
def test_a_restored_order_continues_exactly(shares: list[float], count: int, before: list[int], after: int) -> None:
    sampler = make(shares, count)
    for n in before:
        sampler.next(n)
    restored = make(shares, count)
    restored.next(3)
    restored.restore(json.loads(json.dumps(sampler.state())))
    assert restored.state() == sampler.state()
    assert restored.next(after) == sampler.next(after)


def test_a_gap_in_an_order_of_sources_costs_its_own_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler: Any = make([100, 201])
    draw = mock.Mock(side_effect=sampler._advance)
    monkeypatch.setattr(sampler, "_advance", draw)
    for number, count in ((900, 299), (902, 2), (909, 7), (910, 1)):  # a round has 301
        draw.reset_mock()
        sampler.problem(number)
        assert draw.call_count == count


def test_a_state_at_the_end_of_an_epoch_may_name_either_epoch() -> None:
    sampler, other = make([]), make([])
    sampler.next(5)
    other.restore({**sampler.state(), "epoch": 0, "position": 5})
    assert other.next(7) == sampler.next(7)


@pytest.mark.parametrize(
    ("saved", "others", "refusal"),
    [
        ([1, 2], [{"shares": [2, 1]}, {"answer": "b"}, {"count": 6}], r"the sources of data\.train .* are not those of the"),
        ([], [{"answer": "b"}, {"count": 6}], "the training problems are not those of the checkpoint"),
    ],
)
def test_foreign_states_are_refused(saved: list[float], others: list[dict[str, object]], refusal: str) -> None:
    state = make(saved).state()
    for changes in others:
        with pytest.raises(ValueError, match=refusal):
            make(**{"shares": saved, **changes}).restore(state)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has seed 0, this run has seed = 1"):
        make(saved, seed=1).restore(state)


def test_epochs_seeds_and_sources_of_the_same_size_are_shuffled_differently() -> None:
    def numbers(problems: Sequence[Problem]) -> tuple[str, ...]:
        return tuple(problem.id.partition("/")[2] for problem in problems)

    one, other = make([], 30), make([], 30, seed=1)
    epochs = {numbers(sampler.next(30)) for sampler in (one, one, other)}
    problems = [Problem(f"s{index}/{number}", "q", "a", source=f"s{index}") for index in range(2) for number in range(30)]
    data = DataConfig.model_validate({"train": [{"path": "s0"}, {"path": "s1"}], "heldout": None})
    drawn = ProblemSampler.of(problems, data, 0).next(60)
    epochs |= {numbers([problem for problem in drawn if problem.source == source]) for source in ("s0", "s1")}
    assert len(epochs | {tuple(map(str, range(30)))}) == 6


def test_order_is_the_same_on_every_machine() -> None:
    problems = [Problem(f"p{number}", f"q{number}", "a") for number in range(6)]
    order = ["p2", "p4", "p5", "p1", "p0", "p3", "p0", "p1", "p2", "p4", "p3", "p5"]
    assert [problem.id for problem in ProblemSampler(problems, 7).next(12)] == order
    with pytest.raises(ValueError, match="at least one problem"):
        ProblemSampler([], 0)


def test_orders(tmp_path: Path) -> None:
    own = tmp_path / "orders.py"
    own.write_text(
        "def level(problem):\n    return problem.metadata['level']\n\ndef none(problem):\n    return float('nan')\n\n"
        "def broken(problem):\n    return problem.grade\n"
    )
    every = [Problem(f"p{at}", "q" * (9 - at), "a", {"level": at % 3}) for at in range(9)]

    def ids(order: str, passes: int = 1) -> list[str]:
        config = DataConfig(order=order)
        return [problem.id for problem in ProblemSampler.of(every, config, 0).next(9 * passes)]

    given_order = [f"p{at}" for at in range(9)]
    assert ids("as_given", 2) == given_order * 2
    assert ids("shortest_first") == given_order[::-1]
    assert sorted(ids("shuffled")) == given_order != ids("shuffled")
    easiest = ids(f"{own}:level", 2)
    for each in (easiest[:9], easiest[9:]):
        assert [int(name[1:]) % 3 for name in each] == [0] * 3 + [1] * 3 + [2] * 3
    assert easiest[:9] != easiest[9:]  # equal ones are shuffled anew
    for name, message in (
        (f"{own}:none", "returned nan for problem 'p0'; return a finite number"),
        (f"{own}:broken", r"raised AttributeError on problem 'p0': .* \(/.*/orders\.py:8\)$"),
        (f"{own}:nothing", "has no function nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            ids(name)
    other = ProblemSampler.of(every, DataConfig(order="as_given"), 0)
    with pytest.raises(ValueError, match="not those of the checkpoint"):  # another order is another run
        other.restore(ProblemSampler.of(every, DataConfig(), 0).state())
