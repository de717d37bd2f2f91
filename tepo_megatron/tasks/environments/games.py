"""Games that a model of a few hundred thousand parameters learns."""

from __future__ import annotations

import re

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.tasks.environments.protocol import StepResult

_NUMBER = re.compile(r"\d+")


class GuessNumber:
    """The problem's answer is a number that the model guesses: it is told ``<`` where the number is smaller than its guess,
    ``>`` where it is larger.

    The guess is the first number that the model writes in a turn. The reward is 1 when it is found, and nothing otherwise: who
    halves what is left finds one of 2^k − 1 numbers in k turns. A turn without a number is answered ``?``, and counts as a tool
    error. ``turns``: after so many the game is over.
    """

    def __init__(self, turns: int = 3) -> None:
        self._left = turns
        self._number = 0

    def reset(self, problem: Problem, seed: int) -> None:
        self._number = int(problem.answer)

    def step(self, action: ResponseText) -> StepResult:
        self._left -= 1
        found = _NUMBER.search(action)
        guess = None if found is None else int(found[0])
        if guess == self._number:
            return StepResult(reward=1.0, done=True)
        hint = "?" if guess is None else ("<" if self._number < guess else ">")
        return StepResult(hint, done=self._left <= 0, tool_error=guess is None)
