"""The built-in tasks, by the name that follows ``builtin:`` in a run's YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.tasks import addition, stack_machine


def _guess_number(name: str, rounds: int) -> list[Problem]:
    return [
        Problem(id=f"{name} {turn}: {number}", prompt="guess 1-7?", answer=str(number))
        for turn in range(1, rounds + 1)
        for number in range(1, 8)
    ]


BUILTIN_TASKS: Mapping[str, Callable[[], list[Problem]]] = {
    "addition": addition.train_problems,
    "addition-heldout": addition.heldout_problems,
    "guess-number": partial(_guess_number, "game", 20),
    "guess-number-heldout": partial(_guess_number, "heldout", 4),
    "stack-machine": stack_machine.train_problems,
    "stack-machine-heldout": stack_machine.heldout_problems,
}
