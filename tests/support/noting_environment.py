"""The example's game, which writes down what it was given: imports nothing heavy."""

import json
from pathlib import Path
from typing import Any

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.user_code import load_user_code
from tepo_megatron.tasks.environments.protocol import StepResult

GAME = f"{Path(__file__).parents[2] / 'examples' / 'own_env' / 'distance.py'}:Distance"


class Noting:
    """A line for each episode: its problem, the ids of each turn, its answers, and its reward."""

    def __init__(self, path: str) -> None:
        self.game, self.path = load_user_code(GAME, "the example's environment")(), path

    async def reset(self, problem: Problem, seed: int) -> None:
        await self.game.reset(problem, seed)
        self.turns: list[Any] = []
        self.answers: list[Any] = []
        self.problem, self.reward = problem.id, 0.0

    async def step(self, action: ResponseText) -> StepResult:
        result: StepResult = await self.game.step(action)
        self.turns.append(list(action.token_ids))
        assert isinstance(result.reward, float)
        self.reward += result.reward
        if result.done:
            noted = {"problem": self.problem, "turns": self.turns, "answers": self.answers, "reward": self.reward}
            with Path(self.path).open("a") as file:
                file.write(json.dumps(noted) + "\n")
        else:
            self.answers.append(result.observation)
        return result
