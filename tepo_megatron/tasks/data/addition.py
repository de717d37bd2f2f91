"""Sums of two-digit numbers: ``37+58=`` is answered ``7+8=15 3+5+1=9 95``; a carry of 0 is written too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from hashlib import sha256

from tepo_megatron.core.problem import Problem

NUM_HELDOUT = 200


def train_problems() -> list[Problem]:
    return list(_problems()[NUM_HELDOUT:])


def heldout_problems() -> list[Problem]:
    """Any first n are a fair sample."""
    return list(_problems()[:NUM_HELDOUT])


def supervised_examples(n: int, noise: float, seed: int) -> list[tuple[str, str]]:
    """(prompt, response) pairs. ``noise``: probability in [0, 1] of a slip, which makes the result wrong."""
    rng = random.Random(seed)
    problems = train_problems()
    examples: list[tuple[str, str]] = []
    while len(examples) < n:
        rng.shuffle(problems)
        for problem in problems[: n - len(examples)]:
            slip = rng.choice(_SLIPS) if rng.random() < noise else None
            examples.append((problem.prompt, _write_solution(problem, slip, rng)))
    return examples


_SLIPS = ("units", "carry", "tens", "result")


def _write_solution(problem: Problem, slip: str | None, rng: random.Random) -> str:
    a, b = (int(number) for number in problem.prompt.removesuffix("=").split("+"))

    def slipped(place: str, value: int, choices: Sequence[int]) -> int:
        return value if place != slip else rng.choice([choice for choice in choices if choice != value])

    units = slipped("units", a % 10 + b % 10, range(19))
    carry = slipped("carry", units // 10, range(2))
    tens = slipped("tens", a // 10 + b // 10 + carry, range(2, 20))
    result = slipped("result", 10 * tens + units % 10, range(20, 199))
    return f"{a % 10}+{b % 10}={units} {a // 10}+{b // 10}+{carry}={tens} {result}"


@cache
def _problems() -> tuple[Problem, ...]:
    """Sorted by digest: random generators may change between versions."""
    problems = [Problem(id=f"{a}+{b}", prompt=f"{a}+{b}=", answer=str(a + b)) for a in range(10, 100) for b in range(10, 100)]
    return tuple(sorted(problems, key=lambda problem: sha256(problem.id.encode()).digest()))
