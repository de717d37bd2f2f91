"""Programs for a small stack machine that compute a formula: ``x*(y+3)-z=`` is answered ``xy3+*z-``, or ``3y+x*z-``.

The verifier ``stack_machine`` runs the program on inputs that are not in the prompt, so that every right program counts. With
its end token a program has 6 to 11 characters. ``tepo_megatron/tasks/reward/stack_machine.py`` has the machine's instructions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import shake_256

from tepo_megatron.core.types import Problem
from tepo_megatron.tasks.data.tasks.formulas import INPUTS, Tree, draw, draw_choice, program_of, slipped, text_of, value_of

NUM_HELDOUT = 200
NUM_TRAIN = 10_000
_TESTS = 6


def train_problems() -> list[Problem]:
    """The 10 000 formulas to train on, in an order that is always the same."""
    return [problem for problem, _ in _problems()[NUM_HELDOUT:]]


def heldout_problems() -> list[Problem]:
    """The 200 formulas that are never trained on; any first n of them are a fair sample."""
    return [problem for problem, _ in _problems()[:NUM_HELDOUT]]


def supervised_examples(n: int, noise: float, seed: int) -> list[tuple[str, str]]:
    """``n`` pairs (prompt, program) of training formulas, for a supervised warm start.

    A right program has its operands now and then in another order, so that the model knows several. Args and errors as
    ``addition.supervised_examples``; a program with a slip computes another formula, and fails a test of its problem.
    """
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
        found = slipped(tree, rng)
        if any(value_of(found, inputs) != result for inputs, result in problem.metadata["tests"]):
            return found


@cache
def _problems() -> tuple[tuple[Problem, Tree], ...]:
    """Drawn from digests: no random generator, whose stream a version could change."""
    found: dict[str, tuple[Problem, Tree]] = {}
    number = 0
    while len(found) < NUM_HELDOUT + NUM_TRAIN:
        drawn = iter(shake_256(f"stack machine {number}".encode()).digest(64))
        number += 1
        tree = _draw(drawn)
        tests = [[next(drawn) % 16 - 3 for _ in INPUTS] for _ in range(_TESTS)]
        text = text_of(tree)
        if text not in found and _is_a_task(tree, tests):
            cases = [[inputs, value_of(tree, inputs)] for inputs in tests]
            found[text] = (Problem(text, f"{text}=", program_of(tree), {"tests": cases}), tree)
    return tuple(found.values())


def _draw(drawn: Iterator[int]) -> Tree:
    def pick(count: int) -> int:
        return next(drawn) % count

    return draw_choice(2 + pick(2), pick) if pick(4) == 0 else draw(3 + pick(2), pick)


def _is_a_task(tree: Tree, tests: Sequence[Sequence[int]]) -> bool:
    """Whether it has two inputs or more, and its tests have different results and reach both branches of a choice."""
    if len({letter for letter in text_of(tree) if letter in INPUTS}) < 2:
        return False
    if tree[0] == "?":
        _, condition, first, second = tree
        differ = {value_of(condition, inputs) for inputs in tests if value_of(first, inputs) != value_of(second, inputs)}
        return len(differ) == 2
    return len({value_of(tree, inputs) for inputs in tests}) > 1
