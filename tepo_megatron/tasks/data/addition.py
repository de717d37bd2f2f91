"""Sums of two-digit numbers: ``37+58=`` is answered ``7+8=15 3+5+1=9 95``; a carry of 0 is written too."""

from __future__ import annotations

from functools import cache
from hashlib import sha256

from tepo_megatron.core.problem import Problem

NUM_HELDOUT = 200


def train_problems() -> list[Problem]:
    return list(_problems()[NUM_HELDOUT:])


def heldout_problems() -> list[Problem]:
    """Any first n are a fair sample."""
    return list(_problems()[:NUM_HELDOUT])


@cache
def _problems() -> tuple[Problem, ...]:
    """Sorted by digest: random generators may change between versions."""
    problems = [Problem(id=f"{a}+{b}", prompt=f"{a}+{b}=", answer=str(a + b)) for a in range(10, 100) for b in range(10, 100)]
    return tuple(sorted(problems, key=lambda problem: sha256(problem.id.encode()).digest()))
