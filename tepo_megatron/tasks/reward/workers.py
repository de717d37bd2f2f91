"""The worker processes of a reward pool and their queue of jobs."""

from __future__ import annotations

import json
import sys
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.workers.failure import RememberedFailures, why_it_ended
from tepo_megatron.runtime.workers.process import START_TIMEOUT_S, Worker, WorkerProcess, WorkerSet
from tepo_megatron.tasks.reward.verifiers import resolve_verifier
from tepo_megatron.tasks.reward.worker import SETUP, ScoreOutcome, serve_in_fork, took_too_long

_EXTRA_TIME_S = 2.0
"""Extra time for an ``async`` verifier's worker, which ends late calls itself."""


class RewardWorkers:
    """Forks of this process run the verifier if ``custom`` is one. ``done`` is called with each finished job that was not
    dropped, its outcomes and seconds.
    """

    def __init__(
        self,
        config: RewardConfig,
        queue: JobQueue,
        done: Callable[[Job, Sequence[ScoreOutcome], float], None],
        custom: Any = None,
    ) -> None:
        self._config, self._queue, self._done, self._custom = config, queue, done, custom
        self._verifier = config.verifier if custom is not None else resolve_verifier(config.verifier)
        self._workers: WorkerSet[Worker[Job]] = WorkerSet()
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

    def _start(self) -> Worker[Job]:
        config = self._config
        forked = None if self._custom is None else partial(serve_in_fork, self._custom)
        process = WorkerProcess("tepo_megatron.tasks.reward.worker", forked)
        worker: Worker[Job] = Worker(process)
        setup = {name: getattr(config, name) for name in SETUP}
        setup |= {"verifier": self._verifier, "path": sys.path, "network": not config.cuts_network}
        process.send(setup, START_TIMEOUT_S)
        return worker

    def move(self, timeout_s: float | None = 0.0) -> None:
        """Receives replies and sends jobs; ``timeout_s`` None: no limit. Raises RuntimeError if a replaced worker does not
        start.
        """
        self._wait(timeout_s)  # an idle worker writes nothing: one that can be read has ended and is replaced
        self._send()

    def _send(self) -> None:
        """An idle worker reads at once, so that writing to it does not block."""
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

    def _beside(self, worker: Worker[Job]) -> list[Job]:
        chunk: list[Job] = []
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

    def _take_replies(self, worker: Worker[Job]) -> None:
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

    def _take_reply(self, worker: Worker[Job], reply: Any) -> None:
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

    def _replace(self, worker: Worker[Job], why: str | None = None, *, forgive: bool = False) -> None:
        """``why``: its current job has failed, unless ``forgive`` or several jobs may be the cause."""
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

    def _report(self, job: Job, outcomes: Sequence[ScoreOutcome], seconds: float) -> None:
        if not job.dropped:
            self._done(job, outcomes, seconds)


_LARGEST_CHUNK = 128
_CHARACTERS = 1_000_000
"""A chunk counts to the worker's memory limit."""


@dataclass(eq=False)
class Job:
    number: int
    problem: Problem
    keys: Sequence[Hashable]
    responses: Sequence[ResponseText]
    digest: bytes = field(init=False)
    deadline: float = 0.0
    forgiven: bool = False
    alone: bool = False
    """A worker ended during several jobs; this one runs alone, to find the cause."""
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


class JobQueue:
    """Failed jobs are not sent again."""

    def __init__(self) -> None:
        self.failures = RememberedFailures()
        self._waiting: deque[Job] = deque()
        self._first: dict[bytes, Job] = {}
        self._alike: dict[Job, list[Job]] = {}
        """Job → equal jobs, which wait for its result and fail with it."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, job: Job) -> str | None:
        """Returns the cause if an equal job has failed before."""
        cause = self.failures.get(job.digest)
        if cause is None and job.digest in self._first:
            self._alike[self._first[job.digest]].append(job)
        elif cause is None:
            self._first[job.digest] = job
            self._alike[job] = []
            self._waiting.append(job)
        return cause

    def put_back(self, jobs: Sequence[Job]) -> None:
        self._waiting.extendleft(job for job in reversed(jobs) if not job.dropped)

    def take_chunk(self, workers: int) -> list[Job]:
        """Chunks become smaller towards the end, to balance slow jobs."""
        size = max(1, min(_LARGEST_CHUNK, len(self._waiting) // (4 * workers)))
        chunk: list[Job] = []
        characters = 0
        while self._waiting and len(chunk) < size:
            characters += self._waiting[0].size
            if chunk and (characters > _CHARACTERS or self._waiting[0].alone or chunk[0].alone):
                break
            chunk.append(self._waiting.popleft())
        return chunk

    def take_beside(self, pending: Sequence[Job]) -> Job | None:
        if not self._waiting or any(job.alone for job in pending) or (pending and self._waiting[0].alone):
            return None
        return self._waiting.popleft()

    def succeeded(self, job: Job) -> None:
        """A verifier need not be deterministic, so that equal jobs are queued."""
        self._first.pop(job.digest, None)
        self._waiting.extend(self._alike.pop(job, []))

    def failed(self, job: Job, cause: str) -> list[Job]:
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
