from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem, ResponseText, reward_fault
from tepo_megatron.runtime.text import valid_text
from tepo_megatron.runtime.worker_process import End, Worker, WorkerCall, WorkerPool, WorkerProcess
from tepo_megatron.tasks.protocol import RewardResult, Task
from tepo_megatron.tasks.reward.verifiers import check_reachable, resolve_verifier
from tepo_megatron.tasks.reward.worker import ScoreOutcome, serve_verifier

_REHEARSAL_PROBLEMS = 4


class RewardPool(WorkerPool[Worker["_Job"], "_Job"], Task):
    """A response fails if its verifier raises, returns no finite number or exceeds a limit; equal ones that wait then fail
    untried, without a network later ones too. If a worker dies, its response is tried once more.
    """

    unfinished = 0  # includes incomplete groups

    def __init__(self, config: RewardConfig, components: Sequence[str] | None = None, custom: Any = None) -> None:
        """``components`` is known from another pool's rehearsal; ``custom`` is a verifier object, run in forks."""
        self._config, self._custom = config, custom
        self._queue = _JobQueue(remembers=config.cuts_network)
        self._numbers = count()
        self._incomplete: dict[Hashable, list[tuple[Hashable, Problem, ResponseText]]] = {}
        self._finished: list[tuple[Hashable, RewardResult]] = []
        known = components if config.weights is None else config.weights
        self.components: tuple[str, ...] | None = None if known is None else tuple(known)
        verifier = config.verifier if custom is not None else resolve_verifier(config.verifier)
        forked = None if custom is None else partial(serve_verifier, custom)
        super().__init__(
            lambda: Worker(WorkerProcess("tepo_megatron.tasks.reward.worker", forked)),
            config,
            names=("verifier", "reward", f"the verifier {config.verifier!r}"),  # it may be a source's, or a set's
            setup={"verifier": verifier},
        )

    @property
    def verifier(self) -> str | None:
        return self._config.verifier

    @property
    def scores_groups(self) -> bool:
        return self._facts["of_groups"]

    def another(self) -> RewardPool:
        return RewardPool(self._config, self.components, self._custom)

    def submit(self, key: Hashable, problem: Problem, response: str, *, group: Hashable = None, group_size: int = 1) -> None:
        """``response`` must not change later."""
        self._move(0.0)
        text = response if isinstance(response, ResponseText) else ResponseText(response)
        self.unfinished += 1
        members = [(key, problem, text)]
        if self.scores_groups and group_size > 1:
            members = self._incomplete.setdefault(group, [])
            members.append((key, problem, text))
            if len(members) < group_size:
                return
            del self._incomplete[group]
        keys, texts = [member[0] for member in members], [member[2] for member in members]
        job = _Job(next(self._numbers), problem, keys, texts)
        if (cause := self._queue.add(job)) is not None:
            self._fail([job], cause)
        self._hand_out()

    def poll(self, timeout_s: float | None = 0.0) -> list[tuple[Hashable, RewardResult]]:
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        self._move(0.0)
        while not self._finished and self._works and (left := deadline - time.monotonic()) > 0:
            self._move(left)
        finished, self._finished = self._finished, []
        self.unfinished -= len(finished)
        return finished

    @property
    def under_way(self) -> bool:
        return bool(self._finished) or self._works

    def reset(self) -> None:
        for worker in self._workers:
            for job in worker.pending:
                job.dropped = True
        self._queue.clear()
        self._incomplete.clear()
        self._finished.clear()
        self.unfinished = 0

    def rehearse(self, problems: Sequence[Problem]) -> None:
        """Scores right and wrong answers, and learns the components' names. Raises ValueError if all fail, or none can pass."""
        if self._custom is None:
            check_reachable(self._config.verifier, problems)
        tried = problems[:_REHEARSAL_PROBLEMS]
        wrong = [problem.other_answer(problems) for problem in tried]
        copies = 2 if self.scores_groups else 1
        for whose, texts in (("its own", [problem.answer for problem in tried]), ("another problem's", wrong)):
            items = [(problem, text) for problem, text in zip(tried, texts, strict=True) if text is not None]
            numbers = [number for number, _ in enumerate(items) for _ in range(copies)]
            results = self.score([items[number] for number in numbers], numbers)
            if results and all(result.error for result in results):
                raise ValueError(
                    f"the verifier {self._config.verifier!r} cannot score the first {len(items)} problems, each with "
                    f"{whose} answer as the response: {results[0].error}; correct the verifier, or the data"
                )
            if self.components is None:
                self.components = next((tuple(result.parts) for result in results if not result.error), None)

    @property
    def _works(self) -> bool:
        return bool(self._queue) or any(worker.pending for worker in self._workers)

    def _move(self, timeout_s: float) -> None:
        if not self._workers:
            raise RuntimeError("the reward pool is closed; make a new one")
        try:
            self._wait(timeout_s)  # an idle worker writes nothing: one that can be read has ended and is replaced
            self._hand_out()
        except BaseException:
            # Workers may still be scoring: a later call must not use their replies.
            self.close()
            raise

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.ready and self._queue:
                chunk = max(1, min(_LARGEST_CHUNK, len(self._queue) // (4 * len(self._workers))))
                most = self._config.concurrency if worker.concurrent else 0 if worker.pending else chunk
                self._send(worker, self._queue.take(worker.pending, most))

    def _lost(self, worker: Worker[_Job], why: str, end: End) -> None:
        suspects = [] if end == "grown" else worker.running
        if len(suspects) > 1:
            for job in suspects:
                job.alone = True
        elif suspects and end != "late" and not suspects[0].forgiven:
            suspects[0].forgiven = True  # it may not be the cause: a signal may have come from outside
        elif suspects:
            worker.pending.popleft()
            self._answered(worker, suspects[0], [(None, why)] * len(suspects[0].keys), 0.0)
        self._queue.put_back(worker.pending)

    def _is_answer(self, call: _Job, answer: Any) -> bool:
        return isinstance(answer, list) and len(answer) == len(call.keys) and all(map(_is_outcome, answer))

    def _answered(self, worker: Worker[_Job], job: _Job, outcomes: Sequence[ScoreOutcome], seconds: float) -> None:
        if job.dropped:
            return
        causes = {error for _, error in outcomes}
        if len(causes) == 1 and (cause := causes.pop()) is not None:
            self._fail(self._queue.failed(job, cause), cause, seconds)
            return
        self._queue.succeeded(job)
        for key, (value, error) in zip(job.keys, outcomes, strict=True):
            if value is not None:
                try:
                    reward, parts = weigh(value, self._config.weights, self.components)
                    self._finished.append((key, RewardResult(reward, parts=parts, seconds=seconds)))
                    continue
                except ValueError as wrong:
                    error = str(wrong)
            self._finished.append((key, self._failed(job, error, seconds)))

    def _fail(self, jobs: Sequence[_Job], cause: str, seconds: float = 0.0) -> None:
        self._finished += [(key, self._failed(job, cause, seconds)) for job in jobs for key in job.keys]

    def _failed(self, job: _Job, cause: str | None, seconds: float) -> RewardResult:
        error = valid_text(f"problem {job.problem.id!r}: {cause}")
        return RewardResult(self._config.failed_reward, error, seconds=seconds)


def _is_outcome(item: Any) -> bool:
    match item:
        case [None, str()]:
            return True
        case [dict() as parts, None] if parts:
            return all(type(part) is float for part in parts.values())
        case [float(), None]:
            return True
    return False


def weigh(
    value: float | Mapping[str, float], weights: Mapping[str, float] | None, names: Sequence[str] | None
) -> tuple[float, dict[str, float]]:
    """``weights`` None: 1 each. ``names``: expected components, empty for a number, None for any. Raises ValueError."""
    expected = list(weights) if weights is not None else names
    if not isinstance(value, Mapping):
        if expected:
            raise ValueError(f"the verifier returned a number, not the components {_listed(expected)}{_whence(weights)}")
        if fault := reward_fault(value):
            raise ValueError(f"the reward is {fault}")
        return float(value), {}
    for name in value:
        if fault := RewardConfig.component_fault(name):
            raise ValueError(fault)
    if expected is not None and set(value) != set(expected):
        wanted = f"the components {_listed(expected)}" if expected else "a number"
        raise ValueError(f"the verifier returned the components {_listed(sorted(value))}, not {wanted}{_whence(weights)}")
    parts = {name: float(value[name]) for name in (value if expected is None else expected)}
    weighted = {name: (1.0 if weights is None else weights[name]) * part for name, part in parts.items()}
    for name, part in [*parts.items(), *weighted.items()]:
        if fault := reward_fault(part):
            raise ValueError(f"the component {name[:60]} of the reward is {fault}")
    reward = math.fsum(weighted.values())
    if fault := reward_fault(reward):
        raise ValueError(f"the weighted sum of the components {_listed(list(parts))} is {fault}")
    return reward, parts


def _whence(weights: Mapping[str, float] | None) -> str:
    return " of reward.weights" if weights is not None else " that it returned before"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name[:60] for name in names)


_LARGEST_CHUNK = 128  # chunks shrink towards the end, to balance slow jobs
_CHARACTERS = 1_000_000  # a chunk counts to the worker's memory limit


@dataclass(eq=False)
class _Job(WorkerCall):
    problem: Problem
    keys: Sequence[Hashable]
    responses: Sequence[ResponseText]
    size: int = field(init=False)
    digest: bytes = field(init=False)
    forgiven: bool = False
    alone: bool = False  # it runs alone, to find which job ended a worker
    dropped: bool = False

    def __post_init__(self) -> None:
        text = json.dumps(self.message, sort_keys=True)
        self.size, self.digest = len(text), blake2b(text.encode(), digest_size=16).digest()

    @property
    def message(self) -> list[Any]:
        return [self.problem.to_json(), [response.to_json() for response in self.responses]]


class _JobQueue:
    def __init__(self, *, remembers: bool) -> None:
        self._remembers = remembers  # not what failed with a network: it may succeed later
        self._failures: dict[bytes, str] = {}
        self._waiting: deque[_Job] = deque()
        self._first: dict[bytes, _Job] = {}
        self._alike: dict[_Job, list[_Job]] = {}  # job → equal jobs, which wait for its result and fail with it

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: _Job) -> str | None:
        """Returns why an equal job failed before."""
        cause = self._failures.get(job.digest)
        if cause is None and job.digest in self._first:
            self._alike[self._first[job.digest]].append(job)
        elif cause is None:
            self._first[job.digest] = job
            self._alike[job] = []
            self._waiting.append(job)
        return cause

    def put_back(self, jobs: Sequence[_Job]) -> None:
        self._waiting.extendleft(job for job in reversed(jobs) if not job.dropped)

    def take(self, pending: Sequence[_Job], most: int) -> list[_Job]:
        taken: list[_Job] = []
        characters = 0
        while self._waiting and len(pending) + len(taken) < most:
            job, others = self._waiting[0], [*pending, *taken]
            characters += job.size
            if (taken and characters > _CHARACTERS) or (others and (job.alone or others[0].alone)):
                break
            taken.append(self._waiting.popleft())
        return taken

    def succeeded(self, job: _Job) -> None:
        """Queues equal jobs: verifiers may be random."""
        self._first.pop(job.digest, None)
        self._waiting.extend(self._alike.pop(job, []))

    def failed(self, job: _Job, cause: str) -> list[_Job]:
        self._first.pop(job.digest, None)
        if self._remembers:
            self._failures[job.digest] = cause
            if len(self._failures) > _MOST_FAILURES:
                del self._failures[next(iter(self._failures))]
        return [job, *self._alike.pop(job, [])]

    def clear(self) -> None:
        self._waiting.clear()
        self._first.clear()
        self._alike.clear()


_MOST_FAILURES = 10_000
