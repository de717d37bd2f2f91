"""The stack machine against the values of formulas, which are computed without it; and what a program may do to it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.tiny.make_warm_start import varied_program
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.stack_machine import Tree, problems_with_trees, value_of
from tepo_megatron.tasks.reward.programs import StackMachine

DOUBLE = Problem("p", "x+x=", "xx+", {"tests": [[[2, 0, 0], 4], [[0, 1, 1], 0], [[-3, 0, 0], -6]]})


@given(
    drawn=st.sampled_from(problems_with_trees()),
    seed=st.integers(0, 2**32),
    inputs=st.lists(st.integers(-20, 20), min_size=3, max_size=3),
)
def test_each_way_to_write_a_program_gives_the_formulas_value(
    drawn: tuple[Problem, Tree], seed: int, inputs: list[int]
) -> None:
    problem, tree = drawn
    expected = value_of(tree, inputs)
    assert StackMachine().run(problem.answer, inputs) == expected
    assert StackMachine().run(" \n".join(varied_program(tree, random.Random(seed))), inputs) == expected


@pytest.mark.parametrize(
    ("program", "result"),
    [
        ("x[1-]", 0),
        ("0x[s1+s1-]p", 7),  # counts to x
        ("1[p0]9+", 9),
        ("0[1+]9+", 9),  # not once
        ("xyp", 7),
        ("xys-", -4),
        ("xy<z0?", 0),
        ("yx<z0?", 5),
    ],
)
def test_what_formulas_do_not_use(program: str, result: int) -> None:
    assert StackMachine().run(program, [7, 3, 5]) == result


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("", "it left 0 values"),
        ("xy", "it left 2 values"),
        ("x+", r"\+ takes 2, and there are 1"),
        ("xy?", r"\? takes 3"),
        ("1[]", "it runs longer than 1000 steps"),
        ("1[d]", "it holds more than 100 values"),
        ("9[d*]", "a value beyond"),
        ("x]", r"a \] has no \["),
        ("[x", r"a \[ has no \]"),
        ("xy@", "'@' is no instruction"),
        ("x²", "'²' is no instruction"),
        ("z", "there is no input z"),
    ],
)
def test_a_program_without_a_result_says_why(program: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        StackMachine().run(program, [7, 3])


def test_its_limits_can_be_set() -> None:
    assert StackMachine(steps=5000).run("x[1-]", [500, 0, 0]) == 0
    with pytest.raises(ValueError, match="longer than 5 steps"):
        StackMachine(steps=5).run("x[1-]", [500, 0, 0])
    with pytest.raises(ValueError, match="more than 2 values"):
        StackMachine(depth=2).run("xyz++", [1, 2, 3])
    with pytest.raises(ValueError, match="steps = 0 lets no program run"):
        StackMachine(steps=0)


@pytest.mark.parametrize(
    ("program", "whole", "share"),
    [("xx+", 1, 1), ("2x*", 1, 1), ("x2*y-z+", 1, 1), ("xx*", 0, 2 / 3), ("xxx", 0, 0), ("", 0, 0)],
)
def test_every_right_program_counts_and_a_part_where_it_is_wanted(program: str, whole: float, share: float) -> None:
    assert StackMachine().score(DOUBLE, program) == whole
    assert StackMachine(partial=True).score(DOUBLE, program) == pytest.approx(share)


def test_a_problem_without_tests_is_an_error_of_the_data() -> None:
    with pytest.raises(ValueError, match="the problem has no tests"):
        StackMachine().score(Problem("p", "x+x=", "xx+"), "xx+")
