"""Formulas over three inputs x, y, z, as trees: their text, their programs for the stack machine, their values.

A tree is a leaf, ``"x"`` or ``"7"``; or an operator with its operands, ``("-", "x", ("*", "y", "3"))``; or a choice
``("?", ("<", a, b), c, d)``, which is c where a < b and else d.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Tree = Any
"""A leaf, or a tuple of an operator and trees: Python's types have no name for it."""

INPUTS = "xyz"
LEAVES = INPUTS * 3 + "123456789"
"""Half of what is drawn are inputs."""

OPERATORS = "+-*"
_BINDS = {"?": 0, "<": 1, "+": 2, "-": 2, "*": 3}


def draw(leaves: int, pick: Callable[[int], int]) -> Tree:
    """A formula with so many leaves and no choice. ``pick(n)`` draws a number from 0 to n - 1."""
    if leaves == 1:
        return LEAVES[pick(len(LEAVES))]
    left = 1 + pick(leaves - 1)
    return (OPERATORS[pick(len(OPERATORS))], draw(left, pick), draw(leaves - left, pick))


def draw_choice(leaves: int, pick: Callable[[int], int]) -> Tree:
    """A choice with two inputs compared, and so many leaves in its branches together; two or more."""
    smaller = pick(3)
    condition = ("<", INPUTS[smaller], INPUTS[(smaller + 1 + pick(2)) % 3])
    first = 1 + pick(leaves - 1)
    return ("?", condition, draw(first, pick), draw(leaves - first, pick))


def text_of(tree: Tree, binds: int = 0) -> str:
    """As it is written by hand: ``x-y*3``. Operands of one operator are in brackets where they stand right: ``x-(y-3)``."""
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
    """A program for the stack machine that computes it: operands, then the operator. ``rng``: now and then in another way, the
    second operand first."""
    if isinstance(tree, str):
        return tree
    operator, *operands = tree
    if operator == "?":
        return "".join(program_of(each, rng) for each in operands) + operator
    left, right = operands
    if rng is not None and left == right and rng.random() < 0.5:
        return f"{program_of(left, rng)}d{operator}"
    if rng is not None and rng.random() < 0.1:
        exchanged = "" if operator in "+*" else "s"
        return f"{program_of(right, rng)}{program_of(left, rng)}{exchanged}{operator}"
    return f"{program_of(left, rng)}{program_of(right, rng)}{operator}"


def value_of(tree: Tree, inputs: Sequence[int]) -> int:
    """Its value, computed without the machine."""
    if isinstance(tree, str):
        return inputs[INPUTS.index(tree)] if tree in INPUTS else int(tree)
    operator, *operands = tree
    if operator == "?":
        condition, first, second = operands
        return value_of(first if value_of(condition, inputs) else second, inputs)
    a, b = (value_of(each, inputs) for each in operands)
    return {"+": a + b, "-": a - b, "*": a * b, "<": int(a < b)}[operator]


def slipped(tree: Tree, rng: random.Random) -> Tree:
    """The formula with one mistake: a wrong leaf, a wrong operator, two operands exchanged, or brackets and precedence not
    minded. It may have the same values by chance."""
    kind = rng.choice(("leaf", "operator", "order", "brackets"))
    if kind == "brackets":
        return _from_left_to_right(tree)
    leaf = kind == "leaf"
    places = [place for place, each in _places(tree) if isinstance(each, str) == leaf]
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
        return ("?", tree[1], *(_from_left_to_right(each) for each in tree[2:]))
    leaves, operators = _in_order(tree)
    found: Tree = leaves[0]
    for operator, leaf in zip(operators, leaves[1:], strict=True):
        found = (operator, found, leaf)
    return found


def _in_order(tree: Tree) -> tuple[list[str], list[str]]:
    if isinstance(tree, str):
        return [tree], []
    operator, left, right = tree
    (left_leaves, left_operators), (right_leaves, right_operators) = _in_order(left), _in_order(right)
    return left_leaves + right_leaves, [*left_operators, operator, *right_operators]


def _places(tree: Tree, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Tree]]:
    yield place, tree
    if not isinstance(tree, str):
        for number, each in enumerate(tree[1:], start=1):
            yield from _places(each, (*place, number))


def _changed(tree: Tree, place: tuple[int, ...], change: Callable[[Tree], Tree]) -> Tree:
    if not place:
        return change(tree)
    first, *rest = place
    return (*tree[:first], _changed(tree[first], tuple(rest), change), *tree[first + 1 :])
