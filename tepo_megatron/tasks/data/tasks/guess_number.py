"""A number from 1 to 7 that is to be guessed, for the environment ``guess_number``: the game is the same in each problem."""

from __future__ import annotations

from tepo_megatron.core.types import Problem

NUMBERS = range(1, 8)


def train_problems() -> list[Problem]:
    """Each number twenty times, in turn."""
    return _rounds("game", 20)


def heldout_problems() -> list[Problem]:
    """Each number four times: other names, but no other games."""
    return _rounds("heldout", 4)


def _rounds(name: str, rounds: int) -> list[Problem]:
    return [
        Problem(id=f"{name} {turn}: {number}", prompt="guess 1-7?", answer=str(number))
        for turn in range(1, rounds + 1)
        for number in NUMBERS
    ]
