"""Worker processes that answer calls within limits of time: which of them has answered, and which is late.

What a call is, and what becomes of those of a worker that is late or has ended, is its user's: ``tasks/reward/workers.py`` for
verifiers, ``tasks/environments/workers.py`` for episodes.
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from tepo_megatron.runtime.workers.process import WorkerProcess

START_TIMEOUT_S = 120.0
"""Seconds for a worker to start, and to import and make what it runs; a library for symbolic mathematics takes several."""


class Call(Protocol):
    """``deadline``: when its answer is late, as ``time.monotonic`` counts."""

    deadline: float


C = TypeVar("C", bound=Call)
W = TypeVar("W", bound="Worker[Any]")


@dataclass(eq=False)
class Worker(Generic[C]):
    """A process that has begun to start: whether it is ready for calls, and takes several at once, and which it has."""

    process: WorkerProcess
    ready: bool = False
    concurrent: bool = False
    pending: deque[C] = field(default_factory=deque)
    start_deadline: float = field(default_factory=lambda: time.monotonic() + START_TIMEOUT_S)

    @property
    def idle(self) -> bool:
        return self.ready and not self.pending

    @property
    def running(self) -> list[C]:
        """The calls under way, without those that wait behind the first."""
        return list(self.pending) if self.concurrent else list(self.pending)[:1]

    @property
    def deadline(self) -> float:
        """When it is late: with its start, with the first of its calls, or with any where it has several under way."""
        if not self.ready:
            return self.start_deadline
        return min((call.deadline for call in self.running), default=float("inf"))


class WorkerSet(Generic[W]):
    """The workers of a pool, in a fixed order."""

    def __init__(self) -> None:
        self._workers: list[W] = []
        self._selector = selectors.DefaultSelector()

    def __iter__(self) -> Iterator[W]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def ready(self) -> bool:
        return all(worker.ready for worker in self._workers)

    def add(self, worker: W) -> None:
        self._workers.append(worker)
        self._selector.register(worker.process, selectors.EVENT_READ, worker)

    def kill(self, worker: W) -> None:
        """Its process; what it has written is not read any more. :meth:`replace` gives its place to another."""
        self._selector.unregister(worker.process)
        worker.process.kill()

    def replace(self, killed: W, by: W) -> None:
        self._workers[self._workers.index(killed)] = by
        self._selector.register(by.process, selectors.EVENT_READ, by)

    def wait(self, timeout_s: float) -> Iterator[tuple[W, bool]]:
        """Waits until a process has written or ended, the next deadline, or ``timeout_s`` at most. Yields each worker of which
        something can be read, with True, and each that is late, with False; they may be replaced, and others added, meanwhile.
        """
        due = min((worker.deadline for worker in self._workers), default=float("inf"))
        patience = max(0.0, min(timeout_s, due - time.monotonic()))
        heard = {id(key.data) for key, _ in self._selector.select(patience)}
        for worker in list(self._workers):
            if id(worker) in heard:
                yield worker, True
            elif time.monotonic() >= worker.deadline:
                yield worker, False

    def close(self) -> None:
        """Ends all of them. It may be called more than once."""
        for worker in self._workers:
            worker.process.close()
        self._workers = []
        self._selector.close()
