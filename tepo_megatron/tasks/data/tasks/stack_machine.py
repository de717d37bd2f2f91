"""Formulas for the stack machine of ``tasks/reward/stack_machine.py``: ``x*(y+3)-z=`` is answered ``xy3+*z-`` or ``3y+x*z-``,
in 6 to 11 tokens including the end token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from hashlib import shake_256
from typing import Any

from tepo_megatron.core.problem import Problem

NUM_HELDOUT = 200
NUM_TRAIN = 10_000
_TESTS = 6


def train_problems() -> list[Problem]:
    return [problem for problem, _ in _problems()[NUM_HELDOUT:]]


def heldout_problems() -> list[Problem]:
    """Any first n are a fair sample."""
    return [problem for problem, _ in _problems()[:NUM_HELDOUT]]


def supervised_examples(n: int, noise: float, seed: int) -> list[tuple[str, str]]:
    """As ``addition.supervised_examples``; some correct programs have exchanged operands."""
    if not 0 <= noise <= 1:
        raise ValueError(f"noise = {noise} is a probability: give a value from 0 to 1")
    if n < 0:
        raise ValueError(f"n = {n} examples cannot be written; give 0 or more")
    rng = random.Random(seed)
    problems = list(_problems()[NUM_HELDOUT:])
    examples: list[tuple[str, str]] = []
    while len(examples) < n:
        rng.shuffle(problems)
        for problem, tree in problems[: n - len(examples)]:
            wrong = rng.random() < noise
            written = _another_formula(problem, tree, rng) if wrong else tree
            examples.append((problem.prompt, program_of(written, rng)))
    return examples


def _another_formula(problem: Problem, tree: Tree, rng: random.Random) -> Tree:
    while True:
        outcome = _slipped(tree, rng)
        if any(value_of(outcome, inputs) != result for inputs, result in problem.metadata["tests"]):
            return outcome


@cache
def _problems() -> tuple[tuple[Problem, Tree], ...]:
    """Drawn from digests, because random generators may change between versions."""
    drawn_by_text: dict[str, tuple[Problem, Tree]] = {}
    number = 0
    while len(drawn_by_text) < NUM_HELDOUT + NUM_TRAIN:
        drawn = iter(shake_256(f"stack machine {number}".encode()).digest(64))
        number += 1
        tree = _draw(drawn)
        tests = [[next(drawn) % 16 - 3 for _ in INPUTS] for _ in range(_TESTS)]
        text = text_of(tree)
        if text not in drawn_by_text and _is_a_task(tree, tests):
            cases = [[inputs, value_of(tree, inputs)] for inputs in tests]
            drawn_by_text[text] = (Problem(text, f"{text}=", program_of(tree), {"tests": cases}), tree)
    return tuple(drawn_by_text.values())


def _draw(drawn: Iterator[int]) -> Tree:
    def pick(count: int) -> int:
        return next(drawn) % count

    return draw_choice(2 + pick(2), pick) if pick(4) == 0 else draw(3 + pick(2), pick)


def _is_a_task(tree: Tree, tests: Sequence[Sequence[int]]) -> bool:
    """The tests have different results and reach both branches of a choice."""
    if len({letter for letter in text_of(tree) if letter in INPUTS}) < 2:
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


def draw(leaves: int, pick: Callable[[int], int]) -> Tree:
    """``pick(n)`` draws a number from 0 to n - 1."""
    if leaves == 1:
        return LEAVES[pick(len(LEAVES))]
    left = 1 + pick(leaves - 1)
    return (OPERATORS[pick(len(OPERATORS))], draw(left, pick), draw(leaves - left, pick))


def draw_choice(leaves: int, pick: Callable[[int], int]) -> Tree:
    """``leaves`` (at least two) are those of the choice's branches together."""
    smaller = pick(3)
    condition = ("<", INPUTS[smaller], INPUTS[(smaller + 1 + pick(2)) % 3])
    first = 1 + pick(leaves - 1)
    return ("?", condition, draw(first, pick), draw(leaves - first, pick))


def text_of(tree: Tree, binds: int = 0) -> str:
    if isinstance(tree, str):
        return tree
    operator, *operands = tree
    if operator == "?":
        condition, first, second = operands
        return f"{text_of(condition)}?{text_of(first)}:{text_of(second)}"
    own = _BINDS[operator]
    text = f"{text_of(operands[0], own)}{operator}{text_of(operands[1], own + 1)}"
    return f"({text})" if own < binds else text


def program_of(tree: Tree, rng: random.Random | None = None) -> str:
    if isinstance(tree, str):
        return tree
    operator, *operands = tree
    if operator == "?":
        return "".join(program_of(operand, rng) for operand in operands) + operator
    left, right = operands
    if rng is not None and left == right and rng.random() < 0.5:
        return f"{program_of(left, rng)}d{operator}"
    if rng is not None and rng.random() < 0.1:
        exchanged = "" if operator in "+*" else "s"
        return f"{program_of(right, rng)}{program_of(left, rng)}{exchanged}{operator}"
    return f"{program_of(left, rng)}{program_of(right, rng)}{operator}"


def value_of(tree: Tree, inputs: Sequence[int]) -> int:
    if isinstance(tree, str):
        return inputs[INPUTS.index(tree)] if tree in INPUTS else int(tree)
    operator, *operands = tree
    if operator == "?":
        condition, first, second = operands
        return value_of(first if value_of(condition, inputs) else second, inputs)
    a, b = (value_of(operand, inputs) for operand in operands)
    return {"+": a + b, "-": a - b, "*": a * b, "<": int(a < b)}[operator]


def _slipped(tree: Tree, rng: random.Random) -> Tree:
    kind = rng.choice(("leaf", "operator", "order", "brackets"))
    if kind == "brackets":
        return _from_left_to_right(tree)
    leaf = kind == "leaf"
    places = [place for place, item in _places(tree) if isinstance(item, str) == leaf]
    place = rng.choice(places)
    return _changed(tree, place, lambda each: _slip(each, kind, rng))


def _slip(tree: Tree, kind: str, rng: random.Random) -> Tree:
    if kind == "leaf":
        return rng.choice([leaf for leaf in LEAVES if leaf != tree])
    operator, *operands = tree
    if kind == "order" or operator in "<?":
        *before, first, second = operands
        return (operator, *before, second, first)
    return (rng.choice([other for other in OPERATORS if other != operator]), *operands)


def _from_left_to_right(tree: Tree) -> Tree:
    if isinstance(tree, str):
        return tree
    if tree[0] == "?":
        return ("?", tree[1], *(_from_left_to_right(item) for item in tree[2:]))
    leaves, operators = _in_order(tree)
    result: Tree = leaves[0]
    for operator, leaf in zip(operators, leaves[1:], strict=True):
        result = (operator, result, leaf)
    return result


def _in_order(tree: Tree) -> tuple[list[str], list[str]]:
    if isinstance(tree, str):
        return [tree], []
    operator, left, right = tree
    (left_leaves, left_operators), (right_leaves, right_operators) = _in_order(left), _in_order(right)
    return left_leaves + right_leaves, [*left_operators, operator, *right_operators]


def _places(tree: Tree, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Tree]]:
    yield place, tree
    if not isinstance(tree, str):
        for number, item in enumerate(tree[1:], start=1):
            yield from _places(item, (*place, number))


def _changed(tree: Tree, place: tuple[int, ...], change: Callable[[Tree], Tree]) -> Tree:
    if not place:
        return change(tree)
    first, *rest = place
    return (*tree[:first], _changed(tree[first], tuple(rest), change), *tree[first + 1 :])
