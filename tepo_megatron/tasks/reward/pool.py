"""Worker processes of rank 0 that run a verifier."""

from __future__ import annotations

import json
import math
import sys
import time
from base64 import b64encode
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import count
from types import TracebackType
from typing import Any

from tepo_megatron.config.reward import RewardConfig, component_fault
from tepo_megatron.core.problem import Problem, ResponseText, is_reward, not_a_reward
from tepo_megatron.runtime.text import valid_text
from tepo_megatron.runtime.worker_child import RememberedFailures, why_it_ended
from tepo_megatron.runtime.worker_process import START_TIMEOUT_S, Worker, WorkerProcess, WorkerSet
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.verifiers import resolve_verifier
from tepo_megatron.tasks.reward.worker import SETUP, ScoreOutcome, Value, serve_in_fork, took_too_long

_REHEARSAL_PROBLEMS = 4


class RewardPool:
    """A response fails if its verifier raises, returns no finite number or exceeds a limit; equal responses then fail without a
    try. If a worker dies, its response is tried once more. Not thread-safe. Raises ValueError for an unusable verifier,
    RuntimeError if a worker does not start.
    """

    def __init__(self, config: RewardConfig, components: Sequence[str] | None = None, custom: Any = None) -> None:
        """``components`` is known from another pool's rehearsal; ``custom`` is the verifier as an object."""
        self._config, self._custom = config, custom
        self._queue = _JobQueue()
        self._numbers = count()
        self._incomplete: dict[Hashable, list[tuple[Hashable, Problem, ResponseText]]] = {}
        self._finished: list[tuple[Hashable, RewardResult]] = []
        self._unfinished = 0
        known = components if config.weights is None else config.weights
        self.components: tuple[str, ...] | None = None if known is None else tuple(known)
        self._workers = _RewardWorkers(config, self._queue, self._record, custom)

    @property
    def notice(self) -> str | None:
        return self._workers.notice

    @property
    def scores_groups(self) -> bool:
        return self._workers.of_groups

    def another(self) -> RewardPool:
        return RewardPool(self._config, self.components, self._custom)

    def submit(self, key: Hashable, problem: Problem, response: str, *, group: Hashable = None, group_size: int = 1) -> None:
        """``response`` must not change later. A verifier of groups needs ``group_size`` responses."""
        self._add(key, problem, response, group, group_size)
        self._guarded(self._workers.move)

    def poll(self, timeout_s: float | None = 0.0) -> list[tuple[Hashable, RewardResult]]:
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
        return bool(self._finished) or self._workers.busy

    @property
    def unfinished(self) -> int:
        """Includes incomplete groups."""
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
        """Scores the first problems' own answers, and learns the components' names. Raises ValueError if all fail."""
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
            self._enqueue(_Job(next(self._numbers), problem, [key], [text]))
            return
        members = self._incomplete.setdefault(group, [])
        members.append((key, problem, text))
        if len(members) == group_size:
            del self._incomplete[group]
            self._enqueue(
                _Job(next(self._numbers), problem, [member[0] for member in members], [member[2] for member in members])
            )

    def _enqueue(self, job: _Job) -> None:
        cause = self._queue.add(job)
        if cause is not None:
            self._record_failure([job], cause)

    def _guarded(self, work: Callable[[], None]) -> None:
        if self._workers.closed:
            raise RuntimeError("the reward pool is closed; make a new one")
        try:
            work()
        except BaseException:
            # Workers may still be scoring: a later call must not use their replies.
            self.close()
            raise

    def _record(self, job: _Job, outcomes: Sequence[ScoreOutcome], seconds: float) -> None:
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
        return RewardResult(self._config.failed_reward, valid_text(f"problem {problem.id!r}: {error}"), seconds=seconds)

    def _record_failure(self, jobs: Sequence[_Job], cause: str, seconds: float = 0.0) -> None:
        for job in jobs:
            self._finished += [(key, self._result(job.problem, None, cause, seconds)) for key in job.keys]


def weigh(
    value: float | Mapping[str, float], weights: Mapping[str, float] | None, names: Sequence[str] | None
) -> tuple[float, dict[str, float]]:
    """``weights`` None: 1 each. ``names``: expected components, empty for a number, None for any. Raises ValueError."""
    expected = list(weights) if weights is not None else names
    if not isinstance(value, Mapping):
        if expected:
            raise ValueError(f"the verifier returned a number, not the components {_listed(expected)}{_whence(weights)}")
        if not is_reward(value):
            raise ValueError(f"the reward is {not_a_reward(value)}")
        return float(value), {}
    for name in value:
        fault = component_fault(name)
        if fault is not None:
            raise ValueError(fault)
    if expected is not None and set(value) != set(expected):
        wanted = f"the components {_listed(expected)}" if expected else "a number"
        raise ValueError(f"the verifier returned the components {_listed(sorted(value))}, not {wanted}{_whence(weights)}")
    parts = {name: float(value[name]) for name in (value if expected is None else expected)}
    weighted = {name: (1.0 if weights is None else weights[name]) * part for name, part in parts.items()}
    for name, part in [*parts.items(), *weighted.items()]:
        if not is_reward(part):
            raise ValueError(f"the component {name[:60]} of the reward is {not_a_reward(part)}")
    reward = math.fsum(weighted.values())
    if not is_reward(reward):
        raise ValueError(f"the weighted sum of the components {_listed(list(parts))} is {not_a_reward(reward)}")
    return reward, parts


def _whence(weights: Mapping[str, float] | None) -> str:
    return " of reward.weights" if weights is not None else " that it returned before"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name[:60] for name in names)


_EXTRA_TIME_S = 2.0  # an async verifier's worker ends late calls itself


class _RewardWorkers:
    """Runs ``custom`` in forks of this process. ``done`` receives each finished job that was not dropped."""

    def __init__(
        self,
        config: RewardConfig,
        queue: _JobQueue,
        done: Callable[[_Job, Sequence[ScoreOutcome], float], None],
        custom: Any = None,
    ) -> None:
        self._config, self._queue, self._done, self._custom = config, queue, done, custom
        self._verifier = config.verifier if custom is not None else resolve_verifier(config.verifier)
        self._workers: WorkerSet[Worker[_Job]] = WorkerSet()
        self.notice: str | None = None
        self.of_groups = False
        try:
            for _ in range(config.workers):
                self._workers.add(self._start())
            while not self._workers.ready:
                self._wait(None)
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return not self._workers

    @property
    def busy(self) -> bool:
        return bool(self._queue) or any(worker.pending for worker in self._workers)

    def drop(self) -> None:
        for worker in self._workers:
            for job in worker.pending:
                job.dropped = True

    def close(self) -> None:
        self._workers.close()

    def _start(self) -> Worker[_Job]:
        config = self._config
        forked = None if self._custom is None else partial(serve_in_fork, self._custom)
        process = WorkerProcess("tepo_megatron.tasks.reward.worker", forked)
        worker: Worker[_Job] = Worker(process)
        setup = {name: getattr(config, name) for name in SETUP}
        setup |= {"verifier": self._verifier, "path": sys.path, "network": not config.cuts_network}
        process.send(setup, START_TIMEOUT_S)
        return worker

    def move(self, timeout_s: float | None = 0.0) -> None:
        self._wait(timeout_s)  # an idle worker writes nothing: one that can be read has ended and is replaced
        self._send()

    def _send(self) -> None:
        """An idle worker reads at once, so that writing does not block."""
        for worker in self._workers:
            if not worker.ready or not self._queue:
                continue
            if worker.concurrent:
                chunk = self._beside(worker)
            else:
                chunk = [] if worker.pending else self._queue.take_chunk(len(self._workers))
            if chunk:
                deadline = time.monotonic() + self._config.timeout_s + (_EXTRA_TIME_S if worker.concurrent else 0.0)
                for job in chunk:
                    job.deadline = deadline
                worker.pending.extend(chunk)
                worker.process.send([job.message for job in chunk], self._config.timeout_s)

    def _beside(self, worker: Worker[_Job]) -> list[_Job]:
        chunk: list[_Job] = []
        while len(worker.pending) + len(chunk) < self._config.concurrency:
            job = self._queue.take_beside([*worker.pending, *chunk])
            if job is None:
                break
            chunk.append(job)
        return chunk

    def _wait(self, timeout_s: float | None) -> None:
        patience = 0.0 if all(worker.idle for worker in self._workers) else float("inf") if timeout_s is None else timeout_s
        for worker, has_written in self._workers.wait(patience):
            if has_written:
                self._take_replies(worker)
            else:
                limit = took_too_long(self._config.timeout_s) if worker.ready else f"it took longer than {START_TIMEOUT_S:g} s"
                self._replace(worker, limit, forgive=worker.process.stopped)

    def _take_replies(self, worker: Worker[_Job]) -> None:
        try:
            replies = worker.process.receive()
        except EOFError:
            status = worker.process.exit_status()
            # The response may not be the cause: a signal may have come from outside.
            self._replace(worker, why_it_ended(status, self._config.memory_mb), forgive=True)
            return
        for reply in replies:
            self._take_reply(worker, reply)
        if worker.pending and not worker.concurrent:
            worker.pending[0].deadline = time.monotonic() + self._config.timeout_s

    def _take_reply(self, worker: Worker[_Job], reply: Any) -> None:
        if worker.ready:
            number, outcomes, seconds, last = reply
            job = next(job for job in worker.pending if job.number == number)
            worker.pending.remove(job)
            self._report(job, outcomes, seconds)
            if last:
                self._replace(worker)
        elif "error" in reply:
            raise ValueError(reply["error"])
        else:
            worker.ready, worker.concurrent = True, reply["concurrent"]
            self.notice, self.of_groups = reply["notice"], reply["of_groups"]

    def _replace(self, worker: Worker[_Job], why: str | None = None, *, forgive: bool = False) -> None:
        """``why``: its job failed, unless ``forgive`` or several jobs may be the cause."""
        if not worker.ready:
            raise RuntimeError(f"a worker for reward.verifier = {self._config.verifier!r} did not start: {why}")
        self._workers.kill(worker)
        if why is not None and worker.pending:
            suspects = worker.running
            if len(suspects) > 1:
                for job in suspects:
                    job.alone = True
            elif forgive and not suspects[0].forgiven:
                suspects[0].forgiven = True
            else:
                worker.pending.popleft()
                self._report(suspects[0], [(None, why)] * len(suspects[0].keys), 0.0)
        self._queue.put_back(worker.pending)
        self._workers.replace(worker, self._start())

    def _report(self, job: _Job, outcomes: Sequence[ScoreOutcome], seconds: float) -> None:
        if not job.dropped:
            self._done(job, outcomes, seconds)


_LARGEST_CHUNK = 128
_CHARACTERS = 1_000_000  # a chunk counts to the worker's memory limit


@dataclass(eq=False)
class _Job:
    number: int
    problem: Problem
    keys: Sequence[Hashable]
    responses: Sequence[ResponseText]
    digest: bytes = field(init=False)
    deadline: float = 0.0
    forgiven: bool = False
    alone: bool = False  # it runs alone, to find which job ended a worker
    dropped: bool = False

    def __post_init__(self) -> None:
        self.digest = _key_of(self.problem, self.responses)

    @property
    def message(self) -> list[Any]:
        problem = self.problem
        texts = [[str(text), b64encode(text.packed_ids).decode(), text.finish_reason] for text in self.responses]
        asked = [problem.id, problem.prompt, problem.answer, dict(problem.metadata), problem.messages, problem.source]
        return [self.number, asked, texts]

    @property
    def size(self) -> int:
        problem = self.problem
        parts = sum(len(text) + 2 * len(text.packed_ids) for text in self.responses)
        return len(problem.id) + len(problem.prompt) + len(problem.answer) + parts


class _JobQueue:
    def __init__(self) -> None:
        self.failures = RememberedFailures()
        self._waiting: deque[_Job] = deque()
        self._first: dict[bytes, _Job] = {}
        self._alike: dict[_Job, list[_Job]] = {}  # job → equal jobs, which wait for its result and fail with it

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, job: _Job) -> str | None:
        """Returns the cause if an equal job failed before."""
        cause = self.failures.get(job.digest)
        if cause is None and job.digest in self._first:
            self._alike[self._first[job.digest]].append(job)
        elif cause is None:
            self._first[job.digest] = job
            self._alike[job] = []
            self._waiting.append(job)
        return cause

    def put_back(self, jobs: Sequence[_Job]) -> None:
        self._waiting.extendleft(job for job in reversed(jobs) if not job.dropped)

    def take_chunk(self, workers: int) -> list[_Job]:
        """Chunks shrink towards the end, to balance slow jobs."""
        size = max(1, min(_LARGEST_CHUNK, len(self._waiting) // (4 * workers)))
        chunk: list[_Job] = []
        characters = 0
        while self._waiting and len(chunk) < size:
            characters += self._waiting[0].size
            if chunk and (characters > _CHARACTERS or self._waiting[0].alone or chunk[0].alone):
                break
            chunk.append(self._waiting.popleft())
        return chunk

    def take_beside(self, pending: Sequence[_Job]) -> _Job | None:
        if not self._waiting or any(job.alone for job in pending) or (pending and self._waiting[0].alone):
            return None
        return self._waiting.popleft()

    def succeeded(self, job: _Job) -> None:
        """Verifiers may be random, so that equal jobs are queued."""
        self._first.pop(job.digest, None)
        self._waiting.extend(self._alike.pop(job, []))

    def failed(self, job: _Job, cause: str) -> list[_Job]:
        self._first.pop(job.digest, None)
        self.failures.add(job.digest, cause)
        return [job, *self._alike.pop(job, [])]

    def clear(self) -> None:
        self._waiting.clear()
        self._first.clear()
        self._alike.clear()


def _key_of(problem: Problem, responses: Sequence[ResponseText]) -> bytes:
    digest = blake2b(digest_size=16)
    texts = [problem.id, problem.prompt, problem.answer, json.dumps([problem.metadata, problem.messages], sort_keys=True)]
    for response in responses:
        texts += [response, response.finish_reason]
    for text in texts:
        part = text.encode("utf-8", "surrogatepass")
        digest.update(len(part).to_bytes(8) + part)
    for response in responses:
        digest.update(len(response.packed_ids).to_bytes(8) + response.packed_ids)
    return digest.digest()
