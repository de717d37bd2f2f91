"""A pool of worker processes that run the verifier beside rank 0, with limits for each response."""

from __future__ import annotations

import selectors
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.reward.failure import RememberedFailures, key_of, why_it_ended
from tepo_megatron.reward.process import WorkerProcess
from tepo_megatron.reward.verifiers import resolve_verifier
from tepo_megatron.types import Problem

_START_TIMEOUT_S = 120.0
"""Seconds for a worker to start and import the verifier; a library for symbolic mathematics takes several."""

_LARGEST_CHUNK = 128
_CHARACTERS = 1_000_000
"""Of a chunk of several responses; a worker holds all of it, under its limit of memory."""

_REHEARSED = 4


@dataclass(frozen=True)
class RewardResult:
    """The reward of a response. ``error`` says why it could not be scored; the reward is then ``failed_reward``."""

    reward: float | None
    error: str | None = None


class RewardPool:
    """Runs one verifier in ``config.workers`` processes; they are ready when the constructor returns.

    If a verifier raises, returns no finite number, or passes a limit (``config.timeout_s``, ``memory_mb``, ``file_mb``), only
    that response is affected: it gets ``config.failed_reward`` and an error text with the problem's id. The same response to
    the same problem then fails with the same text, without being tried again; only where the verifier has a network, whose
    fault it may have been, a later call tries again. A worker that hangs, dies or has grown is replaced; a response under which
    one dies or is stopped (SIGSTOP) gets a second chance. Workers end when the parent does, however it ends, and do not receive
    the terminal's Ctrl-C. Only rank 0 needs a pool. A pool is not safe for several threads.

    ``notice`` says which limit this machine's kernel does not grant; None: it grants all.

    Raises:
        ValueError: an unknown verifier, or one that cannot be imported.
        RuntimeError: a worker does not start.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._verifier = resolve_verifier(config.verifier)
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._failures = RememberedFailures()
        self._begin(())
        self.notice: str | None = None
        try:
            for _ in range(config.workers):
                self._workers.append(self._start())
            while not all(worker.ready for worker in self._workers):
                self._wait()
        except BaseException:
            self.close()
            raise

    def rehearse(self, problems: Sequence[Problem]) -> None:
        """Scores the answers of the first few problems, as a run will its responses.

        Raises:
            ValueError: none of them could be scored; with the line of the verifier that raised, where it did.
        """
        results = self.score([(problem, problem.answer) for problem in problems[:_REHEARSED]])
        if results and all(result.error for result in results):
            raise ValueError(
                f"reward.verifier = {self._config.verifier!r} cannot score the first {len(results)} problems, each with its "
                f"own answer as the response: {results[0].error}; correct the verifier, or the data"
            )

    def score(self, items: Sequence[tuple[Problem, str]]) -> list[RewardResult]:
        """Returns the rewards of (problem, response text) pairs, in their order.

        Raises:
            RuntimeError: the pool is closed, or a worker that had to be replaced does not start again.
        """
        if not self._workers:
            raise RuntimeError("the reward pool is closed; make a new one")
        self._begin(items)
        if not self._config.cuts_network:
            self._failures = RememberedFailures()
        self._enqueue(self._first_of_their_kind())
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

    # -- what is to be scored --------------------------------------------------------------------------------------------

    def _begin(self, items: Sequence[tuple[Problem, str]]) -> None:
        self._items = items
        self._keys = [key_of(*item) for item in items]
        self._results: dict[int, RewardResult] = {}
        self._queue: deque[list[int]] = deque()
        self._alike: dict[int, list[int]] = {}
        """The first of items that are the same → the others, which wait for it: if it fails they do, and cost nothing."""
        self._second_chances: set[int] = set()

    def _first_of_their_kind(self) -> list[int]:
        """Records what has failed before; returns the others, of equal ones only the first."""
        first: dict[bytes, int] = {}
        for index, key in enumerate(self._keys):
            cause = self._failures.get(key)
            if cause is not None:
                self._record_failure(index, cause)
            elif key in first:
                self._alike[first[key]].append(index)
            else:
                first[key] = index
                self._alike[index] = []
        return list(first.values())

    def _enqueue(self, indices: Sequence[int]) -> None:
        """Several chunks for each worker, so that a worker with slow responses does not keep the others waiting at the end."""
        size = max(1, min(_LARGEST_CHUNK, len(indices) // (4 * len(self._workers))))
        self._queue.extend(self._chunks(indices, size))

    def _chunks(self, indices: Sequence[int], size: int) -> Iterator[list[int]]:
        chunk: list[int] = []
        characters = 0
        for index in indices:
            length = sum(map(len, _message(*self._items[index])))
            if chunk and (len(chunk) == size or characters + length > _CHARACTERS):
                yield chunk
                chunk, characters = [], 0
            chunk.append(index)
            characters += length
        if chunk:
            yield chunk

    # -- workers ---------------------------------------------------------------------------------------------------------

    def _start(self) -> _Worker:
        config = self._config
        process = WorkerProcess("tepo_megatron.reward.worker")
        worker = _Worker(process, deadline=time.monotonic() + _START_TIMEOUT_S)
        self._selector.register(process, selectors.EVENT_READ, worker)
        setup = {name: getattr(config, name) for name in ("timeout_s", "memory_mb", "file_mb")}
        setup |= {"verifier": self._verifier, "path": sys.path, "network": not config.cuts_network}
        process.send(setup, _START_TIMEOUT_S)
        return worker

    def _replace_dead(self) -> None:
        """Replaces idle workers that have died. An idle worker writes nothing, so one that can be read has ended."""
        for key, _ in self._selector.select(0):
            self._take_replies(key.data)

    def _send_chunks(self) -> None:
        """Sends a chunk to every idle worker, and to no other: an idle worker reads at once, so that writing does not block."""
        for worker in self._workers:
            if worker.ready and not worker.pending and self._queue:
                worker.pending = deque(self._queue.popleft())
                worker.deadline = time.monotonic() + self._config.timeout_s
                worker.process.send([_message(*self._items[index]) for index in worker.pending], self._config.timeout_s)

    def _wait(self) -> None:
        """Takes the replies that have come, waiting until the next deadline for the first; replaces workers that are late."""
        next_deadline = min(worker.deadline for worker in self._workers if not worker.idle)
        heard = {id(key.data) for key, _ in self._selector.select(max(0.0, next_deadline - time.monotonic()))}
        for worker in list(self._workers):
            if id(worker) in heard:
                self._take_replies(worker)
            elif not worker.idle and time.monotonic() >= worker.deadline:
                limit = f"reward.timeout_s = {self._config.timeout_s:g} s" if worker.ready else f"{_START_TIMEOUT_S:g} s"
                self._replace(worker, f"the verifier took longer than {limit}", forgive=worker.process.stopped)

    def _take_replies(self, worker: _Worker) -> None:
        try:
            replies = worker.process.receive()
        except EOFError:
            status = worker.process.exit_status()
            # Of a signal from outside the response knows nothing; its own limits tell.
            self._replace(worker, why_it_ended(status, self._config.memory_mb), forgive=True)
            return
        for reply in replies:
            self._take_reply(worker, reply)
        worker.deadline = time.monotonic() + self._config.timeout_s if worker.ready else worker.deadline

    def _take_reply(self, worker: _Worker, reply: Any) -> None:
        if worker.ready:
            reward, error, last = reply
            self._record(worker.pending.popleft(), reward, error)
            if last:
                self._replace(worker)
        elif "error" in reply:
            raise ValueError(reply["error"])
        else:
            worker.ready, self.notice = True, reply["notice"]

    def _replace(self, worker: _Worker, why: str | None = None, *, forgive: bool = False) -> None:
        """Ends a worker; the rest of its chunk goes to whoever is free. ``why``: its current response has failed, unless it is
        to be forgiven and has not been before.
        """
        if not worker.ready:
            raise RuntimeError(f"a worker for reward.verifier = {self._config.verifier!r} did not start: {why}")
        self._selector.unregister(worker.process)
        worker.process.kill()
        if why is not None and worker.pending:
            if forgive and worker.pending[0] not in self._second_chances:
                self._second_chances.add(worker.pending[0])
            else:
                self._record(worker.pending.popleft(), None, why)
        self._queue.extendleft([index] for index in reversed(worker.pending))
        self._workers[self._workers.index(worker)] = self._start()

    # -- results ---------------------------------------------------------------------------------------------------------

    def _record(self, index: int, reward: float | None, error: str | None) -> None:
        alike = self._alike.pop(index, [])
        if reward is not None:
            self._results[index] = RewardResult(reward)
            self._enqueue(alike)
            return
        cause = str(error)
        self._failures.add(self._keys[index], cause)
        for each in (index, *alike):
            self._record_failure(each, cause)

    def _record_failure(self, index: int, cause: str) -> None:
        problem = self._items[index][0]
        self._results[index] = RewardResult(self._config.failed_reward, f"problem {problem.id!r}: {cause}")


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
