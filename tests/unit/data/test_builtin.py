"""Built-in tasks and models: sums, formulas for a stack machine and what a warm start sees of them; folders of models."""

import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from examples.tiny.make_warm_start import (
    ALPHABET,
    addition_examples,
    long_addition_examples,
    stack_machine_examples,
    written_sum,
)
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data import builtin
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.stack_machine import LEAVES
from tepo_megatron.tasks.reward.programs import StackMachine

SCORE = StackMachine().score


@pytest.mark.parametrize(
    ("task", "size", "form", "heldout_ids", "last"),
    [
        ("addition", 7900, r"\d\d\+\d\d", ["49+95", "56+74", "12+70", "93+92", "40+70"], "45+61"),
        ("long-addition", 10_000, r"\d{3}(\+\d{3}){3}", ["504+994+489+147", "407+194+595+123"], "513+355+937+388"),
        ("stack-machine", 10_000, ".+", ["(z-(y+7))*z", "y<z?9*2:4", "5*(y+(3-x))", "x<y?x:5+z"], "y<x?4:z+7"),
    ],
)
def test_problems_differ_and_their_answers_pass(task: str, size: int, form: str, heldout_ids: list[str], last: str) -> None:
    """Their order comes from digests, so it is the same on every machine and version."""
    train, heldout = load_problems(f"builtin:{task}"), load_problems(f"builtin:{task}-heldout")
    problems = train + heldout
    assert (len(train), len(heldout)) == (size, 200)
    assert len({problem.id for problem in problems}) == size + 200  # all sums of two numbers of two digits, once
    for problem in problems:
        assert problem.prompt == f"{problem.id}="
        assert re.fullmatch(form, problem.id)
        assert set(problem.prompt + problem.answer) <= set(ALPHABET)
        assert len(problem.answer) <= 8
        assert SCORE(problem, problem.answer) == 1 if problem.metadata else eval(problem.id) == int(problem.answer)
    assert [problem.id for problem in heldout[: len(heldout_ids)]] == heldout_ids
    assert train[-1].id == last


def test_examples_without_noise_are_worked_out_and_repeat_after_all_problems() -> None:
    examples = addition_examples(2 * 7900, 0.0, 1)
    assert examples == addition_examples(2 * 7900, 0.0, 1)
    for prompt, response in examples:
        a, b = map(int, prompt.removesuffix("=").split("+"))
        units, carry = a % 10 + b % 10, int(a % 10 + b % 10 >= 10)
        tens = f"{a // 10}+{b // 10}+{carry}={a // 10 + b // 10 + carry}"
        assert response == f"{a % 10}+{b % 10}={units} {tens} {a + b}"
    prompts = [prompt for prompt, _ in examples]
    assert set(prompts[:7900]) == set(prompts[7900:]) == {p.prompt for p in load_problems("builtin:addition")}
    assert prompts[:7900] != prompts[7900:]


@pytest.mark.parametrize(
    ("examples_of", "noise"),
    [(addition_examples, 0.3), (addition_examples, 1.0), (long_addition_examples, 0.0), (long_addition_examples, 0.3)],
)
@settings(max_examples=3)
@given(seed=st.integers(0, 2**32))
def test_noise_is_the_share_of_wrong_solutions(examples_of: Callable[..., Any], noise: float, seed: int) -> None:
    examples = examples_of(2000, noise, seed)
    wrong = sum(eval(prompt[:-1]) != int(response.split()[-1]) for prompt, response in examples)
    assert wrong == 2000 * noise if noise in (0, 1) else abs(wrong / 2000 - noise) < 0.08  # 7.8 standard deviations


@given(terms=st.lists(st.integers(100, 999), min_size=4, max_size=4), seed=st.integers(0, 99), slips=st.booleans())
def test_a_long_sum_is_written_digit_by_digit_and_a_slip_is_one_wrong_digit_sum(
    terms: list[int], seed: int, slips: bool
) -> None:
    partial, wrong = terms[0], 0
    written = written_sum(terms, random.Random(seed), slips=slips)
    for line, term in zip(written.split("\n"), terms[1:], strict=True):
        task, *steps, total = line.split()
        assert task == f"{partial}+{term}:"
        carry = 0
        for place, step in enumerate(steps):
            asked, result = step.split("=")
            a, b = (int(digits.zfill(4)[-1 - place]) for digits in (str(partial), str(term)))
            assert asked == f"{a}+{b}+{carry}"
            wrong += a + b + carry != int(result)
            carry = int(result) // 10
        right = [int(step.split("=")[1]) for step in steps]
        assert int(total) == sum(result % 10 * 10**place for place, result in enumerate(right)) + carry * 10 ** len(right)
        partial = int(total)
    assert wrong == int(slips)
    assert 100 <= len(written) + 1 <= 176
    assert set(written) <= set(ALPHABET)


@cache
def by_prompt() -> dict[str, Problem]:
    return {problem.prompt: problem for problem in load_problems("builtin:stack-machine")}


def test_tests_tell_a_choice_from_its_branches() -> None:
    programs = {problem.id: problem.answer for problem in by_prompt().values()} | {leaf: leaf for leaf in LEAVES}
    found = 0
    for problem in by_prompt().values():
        _, asked, branches = problem.id.partition("?")
        for branch in branches.split(":") if asked else ():
            if branch in programs:
                found += 1
                assert SCORE(problem, programs[branch]) == 0, problem
    assert found > 1000


@given(seed=st.integers(0, 2**32))
@settings(max_examples=10)
def test_without_noise_programs_are_right_in_several_ways(seed: int) -> None:
    examples = stack_machine_examples(400, 0.0, seed)
    assert examples == stack_machine_examples(400, 0.0, seed)
    assert all(SCORE(by_prompt()[prompt], program) == 1 for prompt, program in examples)
    assert 0.5 < sum(program == by_prompt()[prompt].answer for prompt, program in examples) / 400 < 0.9


@pytest.mark.parametrize(("noise", "low", "high"), [(0.3, 0.27, 0.33), (1.0, 1.0, 1.0)])  # 6.5 standard deviations
def test_noise_is_the_share_of_wrong_programs_and_heldout_formulas_are_not_shown(noise: float, low: float, high: float) -> None:
    examples = stack_machine_examples(10_000, noise, 0)
    wrong = sum(SCORE(by_prompt()[prompt], program) == 0 for prompt, program in examples)
    assert low <= wrong / 10_000 <= high
    assert len({prompt for prompt, _ in examples}) == 10_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like a model."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"w": np.ones((4, 4), np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def write_index(folder: Path, content: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def damage(folder: Path) -> None:
    (folder / "config.json").write_text('{"vocab_size": 6')
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


INDEX = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}}


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        (empty, r"it has no config\.json; it has no weights .*; it has no tokenizer .*"),
        (damage, r"its config\.json is damaged .*; its model\.safetensors is damaged .*"),
        (lambda folder: write_index(folder, INDEX), r"1 of 2 weight files are missing \(model-2\.safetensors\)"),
        (lambda folder: write_index(folder, {}), r"its model\.safetensors\.index\.json is damaged .*"),
    ],
)
def test_all_faults_of_a_folder_are_named(folder: Path, change: Callable[[Path], None], faults: str) -> None:
    assert resolve_model_path(str(folder)) == folder
    change(folder)
    with pytest.raises(ValueError, match=f"cannot be used: {faults}$"):
        resolve_model_path(str(folder))


def test_a_folder_that_does_not_exist_is_no_model() -> None:
    with pytest.raises(ValueError, match=r"org/model-8b does not exist; .*hub:ORGANISATION/NAME"):
        resolve_model_path("org/model-8b")


def test_builtin_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = "known: builtin:long-addition, builtin:stack-machine, builtin:tiny; did you mean builtin:tiny"
    with pytest.raises(ValueError, match=known):
        resolve_model_path("builtin:tinny")
    for escape in ("builtin:", "builtin:..", "builtin:tiny/..", "builtin:../builtin/tiny"):
        with pytest.raises(ValueError, match="unknown built-in model"):
            resolve_model_path(escape)
    monkeypatch.setattr(builtin, "files", lambda package: folder.parent)
    (folder.parent / "builtin").symlink_to(folder.parent)
    assert resolve_model_path(f"builtin:{folder.name}").samefile(folder)
