"""Formulas for the stack machine of ``tasks/reward/programs.py``: ``x*(y+3)-z=`` is answered ``xy3+*z-`` or ``3y+x*z-``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from hashlib import shake_256
from itertools import count
from typing import Any

from tepo_megatron.core.problem import Problem

NUM_HELDOUT = 200
NUM_TRAIN = 10_000
_TESTS = 6


@cache
def problems_with_trees() -> tuple[tuple[Problem, Tree], ...]:
    """Drawn from digests, as random generators may change between versions: any first n are a fair sample."""
    drawn_by_text: dict[str, tuple[Problem, Tree]] = {}
    numbers = count()
    while len(drawn_by_text) < NUM_HELDOUT + NUM_TRAIN:
        drawn = iter(shake_256(f"stack machine {next(numbers)}".encode()).digest(64))
        tree = _draw_task(drawn)
        tests = [[next(drawn) % 16 - 3 for _ in INPUTS] for _ in range(_TESTS)]
        text = _text_of(tree)
        if text not in drawn_by_text and _is_a_task(tree, tests):
            cases = [[inputs, value_of(tree, inputs)] for inputs in tests]
            drawn_by_text[text] = (Problem(text, f"{text}=", _program_of(tree), {"tests": cases}), tree)
    return tuple(drawn_by_text.values())


def _draw_task(drawn: Iterator[int]) -> Tree:
    def pick(count: int) -> int:
        return next(drawn) % count

    return _draw_choice(2 + pick(2), pick) if pick(4) == 0 else _draw(3 + pick(2), pick)


def _is_a_task(tree: Tree, tests: Sequence[Sequence[int]]) -> bool:
    """The tests' results differ and reach both branches of a choice."""
    if len({letter for letter in _text_of(tree) if letter in INPUTS}) < 2:
        return False
    if tree[0] == "?":
        _, condition, first, second = tree
        differ = {value_of(condition, inputs) for inputs in tests if value_of(first, inputs) != value_of(second, inputs)}
        return len(differ) == 2
    return len({value_of(tree, inputs) for inputs in tests}) > 1


Tree = Any

INPUTS = "xyz"
LEAVES = INPUTS * 3 + "123456789"

OPERATORS = "+-*"
_BINDS = {"?": 0, "<": 1, "+": 2, "-": 2, "*": 3}


def _draw(leaves: int, pick: Callable[[int], int]) -> Tree:
    """``pick(n)`` returns a number in [0, n)."""
    if leaves == 1:
        return LEAVES[pick(len(LEAVES))]
    left = 1 + pick(leaves - 1)
    return (OPERATORS[pick(len(OPERATORS))], _draw(left, pick), _draw(leaves - left, pick))


def _draw_choice(leaves: int, pick: Callable[[int], int]) -> Tree:
    smaller = pick(3)
    condition = ("<", INPUTS[smaller], INPUTS[(smaller + 1 + pick(2)) % 3])
    first = 1 + pick(leaves - 1)
    return ("?", condition, _draw(first, pick), _draw(leaves - first, pick))


def _text_of(tree: Tree, binds: int = 0) -> str:
    if isinstance(tree, str):
        return tree
    operator, *operands = tree
    if operator == "?":
        condition, first, second = operands
        return f"{_text_of(condition)}?{_text_of(first)}:{_text_of(second)}"
    own = _BINDS[operator]
    text = f"{_text_of(operands[0], own)}{operator}{_text_of(operands[1], own + 1)}"
    return f"({text})" if own < binds else text


def _program_of(tree: Tree) -> str:
    return tree if isinstance(tree, str) else "".join(map(_program_of, tree[1:])) + tree[0]


def value_of(tree: Tree, inputs: Sequence[int]) -> int:
    if isinstance(tree, str):
        return inputs[INPUTS.index(tree)] if tree in INPUTS else int(tree)
    operator, *operands = tree
    if operator == "?":
        condition, first, second = operands
        return value_of(first if value_of(condition, inputs) else second, inputs)
    a, b = (value_of(operand, inputs) for operand in operands)
    return {"+": a + b, "-": a - b, "*": a * b, "<": int(a < b)}[operator]
