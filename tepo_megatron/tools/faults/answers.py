"""Hostile answers to the mathematical verifier: each costs its own response at most, and the responses beside it nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.runtime.proc import command_line
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.pool import RewardPool
from tepo_megatron.tasks.reward.worker import took_too_long
from tepo_megatron.tools.faults.hostile_answers import hostile_answers
from tepo_megatron.tools.faults.outcome import FaultClass, Outcome
from tepo_megatron.tools.faults.processes import descendants

TIMEOUT_S = 2.0
"""A third of the answers costs it."""
ATTEMPTS = 3
"""Of a group in which an honest answer took too long: on a loaded machine it may. One that a hostile answer holds up is late
each time."""
LARGEST_GIB = 2.0


class HostileAnswers(FaultClass):
    """One pool for all of them, with one worker."""

    name = "answers"
    title = "hostile answers to the math verifier"
    whole, quick = 60, 6
    _pool: RewardPool | None = None

    def inject(self, number: int, rng: random.Random) -> Outcome:
        if self._pool is None:
            self._pool = RewardPool(RewardConfig(verifier="math", timeout_s=TIMEOUT_S))
        answers = hostile_answers()
        hostile = answers[number * len(answers) // self.count(quick=self.workshop.is_quick)]  # spread over all groups
        right, wrong = Problem("right", "1+1=", "2"), Problem("wrong", "1+2=", "3")
        neighbours = [(right, r"\boxed{2}"), (hostile.problem, hostile.response), (wrong, r"\boxed{4}"), (right, "$2$")]
        results = score(self._pool, neighbours)
        rewards = [result.reward for result in results]
        if [rewards[0], *rewards[2:]] != [1.0, 0.0, 1.0]:
            errors = [result.error for result in results if result.error]
            return Outcome(hostile.name, "lost", f"the answers beside it got the rewards {rewards}: {errors}")
        if rewards[1] not in (0.0, None):
            return Outcome(hostile.name, "lost", f"it got the reward {rewards[1]}")
        if (peak := _largest_worker_gib()) > LARGEST_GIB:
            return Outcome(hostile.name, "lost", f"the worker grew to {peak:.1f} GiB")
        return Outcome(hostile.name, "refused" if results[1].error else "survived", (results[1].error or "")[:200])

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def score(pool: RewardPool, neighbours: Sequence[tuple[Problem, str]]) -> list[RewardResult]:
    """Scores all again where one beside the hostile, which is the second, took too long; :data:`ATTEMPTS` times in all."""
    late = took_too_long(TIMEOUT_S)
    for _ in range(ATTEMPTS):
        results = pool.score(neighbours)
        if not any(late in (result.error or "") for result in (results[0], *results[2:])):
            break
    return results


def _largest_worker_gib() -> float:
    """The most memory that a worker of this process has had."""
    largest = 0.0
    for pid in descendants(os.getpid()):
        if "tepo_megatron.tasks.reward.worker" in command_line(pid):
            with suppress(OSError):  # it has just been replaced
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("VmHWM"):
                        largest = max(largest, int(line.split()[1]) / 2**20)
    return largest
