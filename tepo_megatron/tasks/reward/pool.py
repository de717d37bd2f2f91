"""A pool of worker processes on rank 0 that run a verifier."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import Any

from tepo_megatron.config.reward import RewardConfig, component_fault
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.workers.failure import RememberedFailures
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.worker import ScoreOutcome, Value
from tepo_megatron.tasks.reward.workers import Job, JobQueue, RewardWorkers

_REHEARSAL_PROBLEMS = 4


class RewardPool:
    """Processes that run one verifier and are ready when the constructor returns. Not thread-safe.

    A response fails (reward ``config.failed_reward``, with an error text) if its verifier raises, returns no finite number or
    exceeds a limit. An equal response then fails without another try. A response during which a worker dies is tried once
    more. Raises ValueError: the verifier cannot be made. RuntimeError: a worker does not start.
    """

    def __init__(self, config: RewardConfig, components: Sequence[str] | None = None, custom: Any = None) -> None:
        """``components``: from another pool's rehearsal. ``custom``: the verifier as an object of this process."""
        self._config, self._custom = config, custom
        self._queue = JobQueue()
        self._numbers = count()
        self._incomplete: dict[Hashable, list[tuple[Hashable, Problem, ResponseText]]] = {}
        self._finished: list[tuple[Hashable, RewardResult]] = []
        self._unfinished = 0
        known = components if config.weights is None else config.weights
        self.components: tuple[str, ...] | None = None if known is None else tuple(known)
        self._workers = RewardWorkers(config, self._queue, self._record, custom)

    @property
    def notice(self) -> str | None:
        return self._workers.notice

    @property
    def scores_groups(self) -> bool:
        return self._workers.of_groups

    def another(self) -> RewardPool:
        return RewardPool(self._config, self.components, self._custom)

    # -- submitting ------------------------------------------------------------------------------------------------------

    def submit(self, key: Hashable, problem: Problem, response: str, *, group: Hashable = None, group_size: int = 1) -> None:
        """``response`` must not change later. A verifier of groups receives a group when ``group_size`` responses were
        submitted. Raises RuntimeError if the pool is closed, or a replaced worker does not start.
        """
        self._add(key, problem, response, group, group_size)
        self._guarded(self._workers.move)

    def poll(self, timeout_s: float | None = 0.0) -> list[tuple[Hashable, RewardResult]]:
        """As ``Task.poll``. Raises as :meth:`submit`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def wait() -> None:
            self._workers.move()
            while not self._finished and self._workers.busy:
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return
                self._workers.move(remaining)

        self._guarded(wait)
        finished, self._finished = self._finished, []
        self._unfinished -= len(finished)
        return finished

    @property
    def under_way(self) -> bool:
        """Whether :meth:`poll` can return or wait for something."""
        return bool(self._finished) or self._workers.busy

    @property
    def unfinished(self) -> int:
        """Includes those of incomplete groups."""
        return self._unfinished

    def reset(self) -> None:
        """A verifier with a network forgets its failures."""
        self._workers.drop()
        self._queue.clear()
        self._incomplete.clear()
        self._finished.clear()
        self._unfinished = 0
        if not self._config.cuts_network:
            self._queue.failures = RememberedFailures()

    def score(self, items: Sequence[tuple[Problem, str]], groups: Sequence[Hashable] | None = None) -> list[RewardResult]:
        """As ``Task.score``. Raises as :meth:`submit`."""
        self.reset()
        named = range(len(items)) if groups is None else groups
        sizes = Counter(named)
        for index, ((problem, response), group) in enumerate(zip(items, named, strict=True)):
            self._add(index, problem, response, group, sizes[group])
        results: dict[Hashable, RewardResult] = {}
        while len(results) < len(items):
            results.update(self.poll(None))
        return [results[index] for index in range(len(items))]

    def rehearse(self, problems: Sequence[Problem]) -> None:
        """Scores the first few problems with their own answers, and learns the components' names. Raises ValueError if all
        fail.
        """
        tried = problems[:_REHEARSAL_PROBLEMS]
        copies = 2 if self.scores_groups else 1
        items = [(problem, problem.answer) for problem in tried for _ in range(copies)]
        results = self.score(items, [number for number, _ in enumerate(tried) for _ in range(copies)])
        if results and all(result.error for result in results):
            raise ValueError(
                f"reward.verifier = {self._config.verifier!r} cannot score the first {len(tried)} problems, each with its "
                f"own answer as the response: {results[0].error}; correct the verifier, or the data"
            )
        if self.components is None:
            self.components = next((tuple(result.parts) for result in results if not result.error), None)

    def close(self) -> None:
        self._workers.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _add(self, key: Hashable, problem: Problem, response: str, group: Hashable, group_size: int) -> None:
        if self._workers.closed:
            raise RuntimeError("the reward pool is closed; make a new one")
        text = response if isinstance(response, ResponseText) else ResponseText(response)
        self._unfinished += 1
        if not self.scores_groups or group_size == 1:
            self._enqueue(Job(next(self._numbers), problem, [key], [text]))
            return
        members = self._incomplete.setdefault(group, [])
        members.append((key, problem, text))
        if len(members) == group_size:
            del self._incomplete[group]
            self._enqueue(
                Job(next(self._numbers), problem, [member[0] for member in members], [member[2] for member in members])
            )

    def _enqueue(self, job: Job) -> None:
        cause = self._queue.add(job)
        if cause is not None:
            self._record_failure([job], cause)

    def _guarded(self, work: Callable[[], None]) -> None:
        if self._workers.closed:
            raise RuntimeError("the reward pool is closed; make a new one")
        try:
            work()
        except BaseException:
            # Workers may still be scoring: their replies must not be used for a later call.
            self.close()
            raise

    # -- results ---------------------------------------------------------------------------------------------------------

    def _record(self, job: Job, outcomes: Sequence[ScoreOutcome], seconds: float) -> None:
        causes = {error for _, error in outcomes}
        cause = causes.pop() if len(causes) == 1 else None
        if cause is not None:
            self._record_failure(self._queue.failed(job, cause), cause, seconds)
            return
        self._queue.succeeded(job)
        for key, (value, error) in zip(job.keys, outcomes, strict=True):
            self._finished.append((key, self._result(job.problem, value, error, seconds)))

    def _result(self, problem: Problem, value: Value | None, error: str | None, seconds: float) -> RewardResult:
        if error is None and value is not None:
            try:
                reward, parts = weigh(value, self._config.weights, self.components)
            except ValueError as wrong:
                error = str(wrong)
            else:
                return RewardResult(reward, parts=parts, seconds=seconds)
        return RewardResult(self._config.failed_reward, f"problem {problem.id!r}: {error}", seconds=seconds)

    def _record_failure(self, jobs: Sequence[Job], cause: str, seconds: float = 0.0) -> None:
        for job in jobs:
            self._finished += [(key, self._result(job.problem, None, cause, seconds)) for key in job.keys]


def weigh(
    value: float | Mapping[str, float], weights: Mapping[str, float] | None, names: Sequence[str] | None
) -> tuple[float, dict[str, float]]:
    """The reward and its components. ``weights`` None: each weighs 1; ``names``: expected components, empty for a number, None
    for any. Raises ValueError: unexpected components, one that cannot be a metric, or a sum that is not finite.
    """
    expected = list(weights) if weights is not None else names
    if not isinstance(value, Mapping):
        if expected:
            raise ValueError(f"the verifier returned a number, not the components {_listed(expected)}{_whence(weights)}")
        return float(value), {}
    for name in value:
        fault = component_fault(name)
        if fault is not None:
            raise ValueError(fault)
    if expected is not None and set(value) != set(expected):
        wanted = f"the components {_listed(expected)}" if expected else "a number"
        raise ValueError(f"the verifier returned the components {_listed(sorted(value))}, not {wanted}{_whence(weights)}")
    parts = {name: float(value[name]) for name in (value if expected is None else expected)}
    reward = math.fsum((1.0 if weights is None else weights[name]) * part for name, part in parts.items())
    if not math.isfinite(reward):
        raise ValueError(f"the weighted sum of the components {_listed(list(parts))} is {reward}, not a finite number")
    return reward, parts


def _whence(weights: Mapping[str, float] | None) -> str:
    return " of reward.weights" if weights is not None else " that it returned before"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name[:60] for name in names)
