"""A pool of worker processes that run the verifier beside rank 0, with a time limit for each response."""

from __future__ import annotations

import selectors
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.reward.process import WorkerProcess
from tepo_megatron.reward.verifiers import resolve_verifier
from tepo_megatron.types import Problem

_START_TIMEOUT_S = 120.0
"""Seconds for a worker to start and import the verifier; a library for symbolic mathematics takes several."""

_LARGEST_CHUNK = 128


@dataclass(frozen=True)
class RewardResult:
    """The reward of a response. ``error`` says why it could not be scored; the reward is then ``failed_reward``."""

    reward: float
    error: str | None = None


class RewardPool:
    """Runs one verifier in ``config.workers`` processes; they are ready when the constructor returns.

    If a verifier raises, returns no finite number, or takes longer than ``config.timeout_s``, only that response is affected:
    it gets ``config.failed_reward`` and an error text with the problem's id. A worker that hangs or dies is replaced. Workers
    end when the parent does, however it ends, and do not receive the terminal's Ctrl-C. Only rank 0 needs a pool. A pool is
    not safe for several threads.

    Raises:
        ValueError: an unknown verifier, or one that cannot be imported.
        RuntimeError: a worker does not start.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._verifier = resolve_verifier(config.verifier)
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._results: dict[int, RewardResult] = {}
        self._queue: deque[list[int]] = deque()
        self._items: Sequence[tuple[Problem, str]] = ()
        try:
            for _ in range(config.workers):
                self._workers.append(self._start())
            while not all(worker.ready for worker in self._workers):
                self._wait()
        except BaseException:
            self.close()
            raise

    def score(self, items: Sequence[tuple[Problem, str]]) -> list[RewardResult]:
        """Returns the rewards of (problem, response text) pairs, in their order.

        Raises:
            RuntimeError: the pool is closed, or a worker that had to be replaced does not start again.
        """
        if not self._workers:
            raise RuntimeError("the reward pool is closed; make a new one")
        # Several chunks for each worker, so that a worker with slow responses does not keep the others waiting at the end.
        size = max(1, min(_LARGEST_CHUNK, len(items) // (4 * len(self._workers))))
        self._items, self._results = items, {}
        self._queue = deque(list(range(at, min(at + size, len(items)))) for at in range(0, len(items), size))
        try:
            self._replace_dead()
            while len(self._results) < len(items):
                self._send_chunks()
                self._wait()
        except BaseException:
            # Workers may still be scoring: their replies must not be taken for a later call's.
            self.close()
            raise
        return [self._results[index] for index in range(len(items))]

    def close(self) -> None:
        """Ends the workers. It may be called more than once."""
        for worker in self._workers:
            worker.process.close()
        self._workers = []
        self._selector.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _start(self) -> _Worker:
        process = WorkerProcess("tepo_megatron.reward.worker")
        worker = _Worker(process, deadline=time.monotonic() + _START_TIMEOUT_S)
        self._selector.register(process, selectors.EVENT_READ, worker)
        process.send({"verifier": self._verifier, "path": sys.path, "timeout_s": self._config.timeout_s})
        return worker

    def _replace_dead(self) -> None:
        """Replaces idle workers that have died. An idle worker writes nothing, so one that can be read has ended."""
        for key, _ in self._selector.select(0):
            self._take_replies(key.data)

    def _send_chunks(self) -> None:
        """Sends a chunk to every idle worker, and to no other: an idle worker reads at once, so that writing never blocks."""
        for worker in self._workers:
            if worker.ready and not worker.pending and self._queue:
                worker.pending = deque(self._queue.popleft())
                worker.deadline = time.monotonic() + self._config.timeout_s
                worker.process.send([_message(*self._items[index]) for index in worker.pending])

    def _wait(self) -> None:
        """Takes the replies that have come, waiting until the next deadline for the first; replaces workers that are late."""
        next_deadline = min(worker.deadline for worker in self._workers if not worker.idle)
        heard = {id(key.data) for key, _ in self._selector.select(max(0.0, next_deadline - time.monotonic()))}
        for worker in list(self._workers):
            if id(worker) in heard:
                self._take_replies(worker)
            elif not worker.idle and time.monotonic() >= worker.deadline:
                limit = f"reward.timeout_s = {self._config.timeout_s:g} s" if worker.ready else f"{_START_TIMEOUT_S:g} s"
                self._replace(worker, f"the verifier took longer than {limit}")

    def _take_replies(self, worker: _Worker) -> None:
        try:
            replies = worker.process.receive()
        except EOFError:
            self._replace(worker, f"the verifier's process ended ({worker.process.exit_status()})")
            return
        for reply in replies:
            self._take_reply(worker, reply)
        worker.deadline = time.monotonic() + self._config.timeout_s if worker.ready else worker.deadline

    def _take_reply(self, worker: _Worker, reply: Any) -> None:
        if worker.ready:
            reward, error = reply
            self._record(worker.pending.popleft(), reward, error)
        elif "error" in reply:
            raise ValueError(reply["error"])
        else:
            worker.ready = True

    def _replace(self, worker: _Worker, why: str) -> None:
        """Ends a worker, records a failure for its current item, and queues the rest of its chunk for a new worker."""
        if not worker.ready:
            raise RuntimeError(f"a worker for reward.verifier = {self._config.verifier!r} did not start: {why}")
        self._selector.unregister(worker.process)
        worker.process.kill()
        if worker.pending:
            self._record(worker.pending.popleft(), None, why)
        if worker.pending:
            self._queue.appendleft(list(worker.pending))
        self._workers[self._workers.index(worker)] = self._start()

    def _record(self, index: int, reward: float | None, error: str | None) -> None:
        if reward is None:
            problem = self._items[index][0]
            self._results[index] = RewardResult(self._config.failed_reward, f"problem {problem.id!r}: {error}")
        else:
            self._results[index] = RewardResult(reward)


@dataclass(eq=False)
class _Worker:
    """A worker process: whether it has loaded the verifier, the items that it has still to score, and its deadline."""

    process: WorkerProcess
    deadline: float

    def __post_init__(self) -> None:
        self.ready = False
        self.pending: deque[int] = deque()

    @property
    def idle(self) -> bool:
        return self.ready and not self.pending


def _message(problem: Problem, response: str) -> list[str]:
    return [problem.id, problem.prompt, problem.answer, response]
