"""What a pool has still to score: calls of the verifier, of which those that are alike wait for the first of them."""

from __future__ import annotations

import json
from base64 import b64encode
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.workers.failure import RememberedFailures

_LARGEST_CHUNK = 128
_CHARACTERS = 1_000_000
"""Of a chunk of several calls; a worker holds all of it, under its limit of memory."""


@dataclass(eq=False)
class Job:
    """One call of the verifier: a response to a problem, or all responses of a group. ``keys``: what they were submitted as."""

    number: int
    problem: Problem
    keys: Sequence[Hashable]
    responses: Sequence[ResponseText]
    digest: bytes = field(init=False)
    deadline: float = 0.0
    forgiven: bool = False
    """A worker ended under it, and it was given a second chance."""
    alone: bool = False
    """A worker ended under it and others; to find out which it was, it gets a worker to itself."""
    dropped: bool = False
    """Nobody waits for it any longer."""

    def __post_init__(self) -> None:
        self.digest = _key_of(self.problem, self.responses)

    @property
    def message(self) -> list[Any]:
        """The call as it is sent to a worker."""
        problem = self.problem
        texts = [[str(text), b64encode(text.packed_ids).decode(), text.finish_reason] for text in self.responses]
        asked = [problem.id, problem.prompt, problem.answer, dict(problem.metadata), problem.messages, problem.source]
        return [self.number, asked, texts]

    @property
    def size(self) -> int:
        """About how many characters its message has."""
        problem = self.problem
        parts = sum(len(text) + 2 * len(text.packed_ids) for text in self.responses)
        return len(problem.id) + len(problem.prompt) + len(problem.answer) + parts


class JobQueue:
    """Jobs in the order in which they are to be sent. ``failures``: what is known to fail, and is not sent."""

    def __init__(self) -> None:
        self.failures = RememberedFailures()
        self._waiting: deque[Job] = deque()
        self._first: dict[bytes, Job] = {}
        self._alike: dict[Job, list[Job]] = {}
        """A job that is under way or waits → others that are the same, which wait for it: if it fails they do too."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, job: Job) -> str | None:
        """Queues a job; returns why it fails, if the same one has failed before."""
        cause = self.failures.get(job.digest)
        if cause is None and job.digest in self._first:
            self._alike[self._first[job.digest]].append(job)
        elif cause is None:
            self._first[job.digest] = job
            self._alike[job] = []
            self._waiting.append(job)
        return cause

    def put_back(self, jobs: Sequence[Job]) -> None:
        """Queues jobs that a worker did not get to, before all others."""
        self._waiting.extendleft(job for job in reversed(jobs) if not job.dropped)

    def take_chunk(self, workers: int) -> list[Job]:
        """The next jobs for one of so many workers: fewer towards the end, so that slow ones do not keep the others waiting."""
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
        """The next job for a worker that has these under way; None where it can take no more."""
        if not self._waiting or any(job.alone for job in pending) or (pending and self._waiting[0].alone):
            return None
        return self._waiting.popleft()

    def succeeded(self, job: Job) -> None:
        """Those that are the same are scored too: a verifier need not give the same response the same reward."""
        self._first.pop(job.digest, None)
        self._waiting.extend(self._alike.pop(job, []))

    def failed(self, job: Job, cause: str) -> list[Job]:
        """Remembers why; returns the jobs that failed: this one, and those that are the same."""
        self._first.pop(job.digest, None)
        self.failures.add(job.digest, cause)
        return [job, *self._alike.pop(job, [])]

    def clear(self) -> None:
        """Forgets the jobs, not the failures."""
        self._waiting.clear()
        self._first.clear()
        self._alike.clear()


def _key_of(problem: Problem, responses: Sequence[ResponseText]) -> bytes:
    """16 bytes that stand for the responses to a problem, and for all that a verifier sees of them."""
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
