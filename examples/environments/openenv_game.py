"""The number from 1 to 7, drawn with the group's seed, as an environment of OpenEnv: its client, and by `python` its server."""

import random
import sys
from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server import Action, Environment, Observation, create_fastapi_app
from openenv.core.env_server.types import State


class Guess(Action):  # type: ignore[misc]
    number: str


class Hint(Observation):  # type: ignore[misc]
    text: str = ""


class GuessNumber(Environment[Guess, Hint, State]):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self._number, self._left = random.Random(seed).randint(1, 7), 3
        return Hint(done=False)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._left -= 1
        guess = int(action.number) if action.number.isdecimal() else 0
        text = "" if guess == self._number else "<" if self._number < guess else ">"
        return Hint(text=text, reward=float(not text), done=not text or not self._left)

    @property
    def state(self) -> State:
        return State()


class Client(EnvClient[Guess, Hint, State]):  # type: ignore[misc]
    def _step_payload(self, action: Guess) -> dict[str, Any]:
        return action.model_dump()

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Hint]:
        return StepResult(Hint(**payload["observation"]), payload["reward"], payload["done"])

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)


if __name__ == "__main__":
    import uvicorn

    app = create_fastapi_app(GuessNumber, Guess, Hint, max_concurrent_envs=64)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
