"""An environment that misbehaves as it is told, for worker processes: imports nothing heavy."""

import os
import socket
import time
from typing import Any, ClassVar

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.tasks.environments.protocol import StepResult

RETURNED: dict[str, Any] = {
    "outside": StepResult([5, 50]),
    "below": StepResult([5, 6, -1]),
    "unknown text": StepResult("é"),
    "no result": ("1", 0.0, False),
    "no number": StepResult(reward=float("nan")),
    "too much": StepResult(reward=1e39, done=True),
    "component": StepResult(reward={"right": 1e308}, done=True),
    "sum": StepResult("1", reward=9e14),
    "odd": StepResult(reward=0.5, observation={"a": 1}),  # type: ignore[arg-type]
    "two kinds": StepResult(reward={"right": 1.0}, done=True),
}


def misbehave(how: str) -> None:
    match how:
        case "raises":
            raise KeyError("gone")
        case "exits":
            raise SystemExit(3)
        case "hangs":
            time.sleep(60)
        case "dies":
            os._exit(1)


class Hostile:
    """An environment that does in its second turn what its problem's answer says, and ends with the third."""

    def __init__(self, broken: bool = False) -> None:
        if broken:
            raise OSError("no licence")

    def reset(self, problem: Problem, seed: int) -> Any:
        self.do, self.turn = problem.answer, 0
        if self.do == "messages at reset":
            return [{"role": "user", "content": "no"}]
        if self.do == "a step at reset":
            return StepResult(done=True)
        return None

    def step(self, action: ResponseText) -> Any:
        self.turn += 1
        if self.do == "ends at once":
            return StepResult(reward=0.25, done=True)
        if self.do == "never ends":
            return StepResult("1")
        if self.turn < 2:
            return StepResult("1", reward=0.5)
        misbehave(self.do)
        return RETURNED.get(self.do, StepResult(reward=0.5, done=True))

    def close(self) -> None:
        if self.do.startswith("close "):
            misbehave(self.do.removeprefix("close "))


class Patient(Hostile):
    """The same, ``async``: many episodes at once."""

    async def step(self, action: ResponseText) -> Any:
        return super().step(action)


class Waits(Patient):
    async def close(self) -> None:  # type: ignore[override]
        import asyncio

        await asyncio.sleep(60)


class Leaking(Hostile):
    """Keeps 20 MB of each episode."""

    kept: ClassVar[list[bytearray]] = []

    def step(self, action: ResponseText) -> Any:
        self.kept.append(bytearray(20 * 10**6))
        return StepResult(reward=1.0, done=True)


class Large(Hostile):
    """Keeps 60 MB until it is closed."""

    def reset(self, problem: Problem, seed: int) -> Any:
        self.kept = bytearray(60 * 10**6)
        return super().reset(problem, seed)


class Connected(Patient):
    """Holds two sockets."""

    def reset(self, problem: Problem, seed: int) -> Any:
        self.sockets = socket.socketpair()
        return super().reset(problem, seed)


class Slow:
    """Says after a while what its problem's answer is, again and again."""

    def reset(self, problem: Problem, seed: int) -> None:
        self.says = problem.answer

    def step(self, action: ResponseText) -> StepResult:
        time.sleep(0.2)
        return StepResult(self.says, reward=float(self.says))


class Says:
    def __init__(self, first: Any = None, then: Any = None, reward: Any = 0.0) -> None:
        self.first, self.then, self.reward = first, then, reward

    def reset(self, problem: Problem, seed: int) -> Any:
        return self.first

    def step(self, action: ResponseText) -> StepResult:
        return StepResult(self.then, self.reward)
