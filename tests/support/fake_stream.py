"""Servers that sample when a test says so, for what samples ahead of the trainer."""

from __future__ import annotations

import queue
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Response, Rollout, WeightsVersion
from tepo_megatron.tasks.protocol import RewardResult


@dataclass
class FakeServers:
    """``asked``: (number of the group, seed, samples) of every request. :meth:`finish` gives a group's responses, :meth:`fail`
    has what samples raise."""

    asked: list[tuple[int, int, int]] = field(default_factory=list)
    streams: int = 0
    """That were opened."""
    _ready: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)

    def open(self, on_move: Callable[[], None]) -> FakeStream:
        self.streams += 1
        on_move()
        while not self._ready.empty():
            self._ready.get()
        return FakeStream(self)

    def finish(self, number: int, *spans: tuple[int, int], samples: int = 2) -> None:
        """``spans``: (first token, step of the weights)."""
        versions = tuple((start, WeightsVersion(step, f"{step:x}")) for start, step in spans)
        for sample in range(samples):
            self._ready.put((number, sample, Response([5, 6, 7 + sample], [-1.0, -2.0, -3.0], "stop", versions)))

    def fail(self, error: Exception) -> None:
        self._ready.put(error)


@dataclass
class FakeStream:
    servers: FakeServers

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def submit(self, key: int, prompt_ids: Sequence[int], seed: int, n: int) -> None:
        self.servers.asked.append((key, seed, n))

    def next(self, timeout_s: float) -> tuple[int, int, Response] | None:
        try:
            found = self.servers._ready.get(timeout=min(timeout_s, 0.005))
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            raise found
        return found


@dataclass
class FakeVerifiers:
    """Rewards a response with ``reward(problem)`` as soon as it is asked."""

    reward: Callable[[Problem], float | None] = lambda problem: 1.0
    scores_groups: bool = False
    _done: list[tuple[Hashable, RewardResult]] = field(default_factory=list)

    @property
    def unfinished(self) -> int:
        return len(self._done)

    def submit(self, key: Hashable, problem: Problem, response: str, *, group: Hashable, group_size: int) -> None:
        reward = self.reward(problem)
        self._done.append((key, RewardResult(reward, None if reward is not None else "broken")))

    def poll(self, timeout_s: float | None = 0.0) -> list[tuple[Hashable, RewardResult]]:
        found, self._done = self._done, []
        return found

    def reset(self) -> None:
        self._done = []

    def take_figures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        return {}

    def close(self) -> None:
        return None
