"""The tasks that ship with the package, by the name that follows ``builtin:`` in a run's YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tepo_megatron.core.types import Problem
from tepo_megatron.tasks.data.tasks import addition, guess_number, stack_machine

BUILTIN_TASKS: Mapping[str, Callable[[], list[Problem]]] = {
    "addition": addition.train_problems,
    "addition-heldout": addition.heldout_problems,
    "guess-number": guess_number.train_problems,
    "guess-number-heldout": guess_number.heldout_problems,
    "stack-machine": stack_machine.train_problems,
    "stack-machine-heldout": stack_machine.heldout_problems,
}
