"""The number from 1 to 7, drawn with the group's seed, as an environment of Gymnasium."""

import re
from string import printable
from typing import Any

import gymnasium
from gymnasium.spaces import Text


class GuessNumber(gymnasium.Env[str, str]):  # type: ignore[misc] # where it is not installed
    observation_space = action_space = Text(1000, min_length=0, charset=printable)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)  # options: the problem's id, prompt, answer and metadata
        self._number = 1 + int(self.np_random.integers(7))
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        found = re.search(r"\d+", action)
        guess = 0 if found is None else int(found[0])
        hint = "" if guess == self._number else "<" if self._number < guess else ">"
        return hint, float(not hint), not hint, False, {"tool_error": found is None}


def make(turns: int = 3) -> gymnasium.Env[str, str]:
    return gymnasium.make("GuessNumber-v0", max_episode_steps=turns)


gymnasium.register("GuessNumber-v0", GuessNumber)
