"""An environment of one's own: a number is to be found, and the answer to a guess is how far it is off.

Everything that an environment needs is in this file; docs/guides/environments.md has the protocol.
"""

from tepo_megatron import Problem, ResponseText, StepResult


class Distance:
    """A number from 1 to 9. Found in the first two turns it gives 1, in the third 0.5; the game ends with the third.

    Who guesses 1 or 9 first knows the number after one answer.
    """

    def __init__(self, turns: int = 3) -> None:
        self.left = turns
        self.number = 0

    async def reset(self, problem: Problem, seed: int) -> None:
        self.number = int(problem.answer)

    async def step(self, action: ResponseText) -> StepResult:
        self.left -= 1
        if not (action.isdecimal() and len(action) == 1):
            return StepResult("?", done=self.left == 0, tool_error=True)
        if int(action) == self.number:
            return StepResult(reward=1.0 if self.left else 0.5, done=True)
        return StepResult(str(abs(int(action) - self.number)), done=self.left == 0)
