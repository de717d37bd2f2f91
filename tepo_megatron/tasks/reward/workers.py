"""The worker processes of a pool: started, given jobs, listened to, and replaced where they hang, die or have grown."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.runtime.workers.failure import why_it_ended
from tepo_megatron.runtime.workers.process import WorkerProcess
from tepo_megatron.runtime.workers.worker_set import START_TIMEOUT_S, Worker, WorkerSet
from tepo_megatron.tasks.reward.calls import Outcome, took_too_long
from tepo_megatron.tasks.reward.jobs import Job, JobQueue
from tepo_megatron.tasks.reward.verifiers import resolve_verifier
from tepo_megatron.tasks.reward.worker import SETUP, serve_in_fork

_SLACK_S = 2.0
"""An ``async`` verifier's worker ends a call that is late itself; one that cannot is given so long."""


class Workers:
    """``config.workers`` processes that take jobs from ``queue``; ready when the constructor returns.

    ``given``: the verifier itself, where it is an object of this process; the workers are forks of it then.

    ``done`` is called with each job that is finished, what its responses got, and the seconds that it took; not with dropped
    ones. ``notice`` says which limit this machine's kernel does not grant; ``of_groups`` whether the verifier is one of groups.
    """

    def __init__(
        self,
        config: RewardConfig,
        queue: JobQueue,
        done: Callable[[Job, Sequence[Outcome], float], None],
        given: Any = None,
    ) -> None:
        self._config, self._queue, self._done, self._given = config, queue, done, given
        self._verifier = config.verifier if given is not None else resolve_verifier(config.verifier)
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
        """Whether there is a job, under way or waiting."""
        return bool(self._queue) or any(worker.pending for worker in self._workers)

    def drop(self) -> None:
        """Nobody waits for the jobs that are under way; workers finish them."""
        for worker in self._workers:
            for job in worker.pending:
                job.dropped = True

    def close(self) -> None:
        """Ends the workers. It may be called more than once."""
        self._workers.close()

    def _start(self) -> Worker[Job]:
        config = self._config
        forked = None if self._given is None else partial(serve_in_fork, self._given)
        process = WorkerProcess("tepo_megatron.tasks.reward.worker", forked)
        worker: Worker[Job] = Worker(process)
        setup = {name: getattr(config, name) for name in SETUP}
        setup |= {"verifier": self._verifier, "path": sys.path, "network": not config.cuts_network}
        process.send(setup, START_TIMEOUT_S)
        return worker

    def move(self, timeout_s: float | None = 0.0) -> None:
        """Takes replies, waiting up to ``timeout_s`` for the first of them (None: as long as it takes), and sends what can be
        sent. Raises RuntimeError where a worker that had to be replaced does not start again."""
        self._wait(timeout_s)  # an idle worker writes nothing, so one that can be read has ended, and is replaced
        self._send()

    def _send(self) -> None:
        """Sends to every idle worker, and to no other unless it takes several calls at once: an idle worker reads at once, so
        that writing does not block."""
        for worker in self._workers:
            if not worker.ready or not self._queue:
                continue
            if worker.concurrent:
                chunk = self._beside(worker)
            else:
                chunk = [] if worker.pending else self._queue.take_chunk(len(self._workers))
            if chunk:
                deadline = time.monotonic() + self._config.timeout_s + (_SLACK_S if worker.concurrent else 0.0)
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
        """Takes the replies that have come, waiting until the next deadline for the first, ``timeout_s`` at most; replaces
        workers that are late."""
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
            # Of a signal from outside the response knows nothing; its own limits tell.
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
        """Ends a worker; the rest of what it has goes to whoever is free. ``why``: its current response has failed, unless it
        is to be forgiven and has not been before, or is one of several that may have been the cause."""
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

    def _report(self, job: Job, outcomes: Sequence[Outcome], seconds: float) -> None:
        if not job.dropped:
            self._done(job, outcomes, seconds)
