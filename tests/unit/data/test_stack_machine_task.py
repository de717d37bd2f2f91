"""The formulas that programs for the stack machine are asked for, and what a warm start sees of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.tiny.make_warm_start import ALPHABET, stack_machine_examples
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data import stack_machine
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.stack_machine import LEAVES, Tree, problems_with_trees, value_of
from tepo_megatron.tasks.reward.programs import StackMachine

BY_PROMPT = {problem.prompt: problem for problem in stack_machine.train_problems()}
SCORE = StackMachine().score


def test_problems_differ_and_their_answers_pass() -> None:
    train, heldout = load_problems("builtin:stack-machine"), load_problems("builtin:stack-machine-heldout")
    assert (len(train), len(heldout)) == (10_000, 200)
    problems = train + heldout
    assert len({problem.prompt for problem in problems}) == len({problem.id for problem in problems}) == len(problems)
    assert all(SCORE(problem, problem.answer) == 1 for problem in problems)
    assert all(set(problem.prompt + problem.answer) <= set(ALPHABET) for problem in problems)
    assert max(len(problem.answer) for problem in problems) <= 8


def test_the_split_is_the_published_one() -> None:
    """Formulas come from digests, so these hold on every machine and version."""
    assert [problem.id for problem in stack_machine.heldout_problems()[:4]] == HELDOUT_START
    assert stack_machine.train_problems()[-1].id == TRAIN_END


def test_tests_tell_a_choice_from_its_branches() -> None:
    programs = {problem.id: problem.answer for problem in BY_PROMPT.values()} | {leaf: leaf for leaf in LEAVES}
    found = 0
    for problem in BY_PROMPT.values():
        _, asked, branches = problem.id.partition("?")
        for branch in branches.split(":") if asked else ():
            if branch in programs:
                found += 1
                assert SCORE(problem, programs[branch]) == 0, problem
    assert found > 1000


@given(drawn=st.sampled_from(problems_with_trees()), inputs=st.tuples(*[st.integers(-9, 9)] * 3))
def test_a_formula_has_its_trees_value(drawn: tuple[Problem, Tree], inputs: tuple[int, int, int]) -> None:
    problem, tree = drawn
    names = dict(zip("xyz", inputs, strict=True))

    def value(formula: str) -> int:
        condition, asked, branches = formula.partition("?")
        first, _, second = branches.partition(":")
        return int(eval(formula if not asked else first if eval(condition, {}, names) else second, {}, names))

    assert value(problem.id) == value_of(tree, inputs)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_without_noise_programs_are_right_in_several_ways(seed: int) -> None:
    examples = stack_machine_examples(400, 0.0, seed)
    assert examples == stack_machine_examples(400, 0.0, seed)
    assert all(SCORE(BY_PROMPT[prompt], program) == 1 for prompt, program in examples)
    assert 0.5 < sum(program == BY_PROMPT[prompt].answer for prompt, program in examples) / 400 < 0.9


@pytest.mark.parametrize(("noise", "low", "high"), [(0.3, 0.27, 0.33), (1.0, 1.0, 1.0)])  # 6.5 standard deviations
def test_noise_is_the_share_of_wrong_programs_and_heldout_formulas_are_not_shown(noise: float, low: float, high: float) -> None:
    examples = stack_machine_examples(10_000, noise, 0)
    wrong = sum(SCORE(BY_PROMPT[prompt], program) == 0 for prompt, program in examples)
    assert low <= wrong / 10_000 <= high
    assert len({prompt for prompt, _ in examples}) == 10_000


HELDOUT_START = ["(z-(y+7))*z", "y<z?9*2:4", "5*(y+(3-x))", "x<y?x:5+z"]
TRAIN_END = "y<x?4:z+7"
