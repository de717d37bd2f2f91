"""Samples and scores a buffer's groups, a finished response at once; only the main thread revives servers and sends weights."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Response, Rollout
from tepo_megatron.run.sampling.groups import UNFINISHED, Group, GroupBuffer
from tepo_megatron.run.sampling.journal import GroupStore
from tepo_megatron.run.sampling.step_rewards import answer_of
from tepo_megatron.run.step.minibatches import derive_seed
from tepo_megatron.sampler.protocol import ResponseStream
from tepo_megatron.sampler.sampling import prompt_seed
from tepo_megatron.tasks.protocol import Task

POLL_INTERVAL_S = 0.2

_FAST_POLL_S = 0.02  # the longest wait for a response while verifiers owe answers

Ended = Callable[[], bool]


class BusyClock:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy, self._holds = False, 0
        self._seconds, self._mark = 0.0, time.perf_counter()

    def set(self, busy: bool) -> None:
        with self._charged():
            self._busy = busy

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        self.set(True)
        try:
            yield
        finally:
            self.set(False)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """No time counts while the servers receive weights, or evaluate."""
        with self._charged():
            self._holds += 1
        try:
            yield
        finally:
            with self._charged():
                self._holds -= 1

    def take(self) -> float:
        with self._charged():
            seconds, self._seconds = self._seconds, 0.0
            return seconds

    @contextlib.contextmanager
    def _charged(self) -> Iterator[None]:
        with self._lock:
            now = time.perf_counter()
            if self._busy and not self._holds:
                self._seconds += now - self._mark
            self._mark = now
            yield


@dataclass
class GroupWorker:
    buffer: GroupBuffer
    task: Task
    files: GroupStore
    clock: BusyClock
    decode: Callable[[Sequence[int]], str]
    seed: int
    partial: bool  # at the end of ``run`` unfinished responses are kept for the next one
    on_progress: Callable[[], None]
    phase: Callable[[str], AbstractContextManager[None]]
    problems: dict[int, Problem] = field(init=False, default_factory=dict)  # of the request that is being submitted
    _sampling: int = field(init=False, default=0)
    _scoring: int = field(init=False, default=0)

    def run(self, stream: ResponseStream, is_done: Ended) -> None:
        """After an error groups keep the finished responses."""
        self.buffer.requeue()
        self.task.reset()
        self._sampling = self._scoring = 0
        with self.clock.busy():
            with self.phase("rollout"):
                self._ask(stream)
            while not is_done():
                if not self._sampling and not self._scoring:
                    assert self.buffer.window, "a step that is not ready has something outstanding"
                    self.buffer.wait_for_room(POLL_INTERVAL_S)
                    self._ask(stream)
                    continue
                with self.phase("rollout" if self._sampling else "reward"):
                    self._pump(stream, is_done)
            if self.partial:
                self._put_aside(stream)

    def _pump(self, stream: ResponseStream, is_done: Ended) -> None:
        samples = self._sampling > 0
        while (self._sampling > 0) == samples and (self._sampling or self._scoring) and not is_done():
            if samples and (result := stream.next(_FAST_POLL_S if self._scoring else POLL_INTERVAL_S)):
                self._receive(*result)
            self._take_rewards(0.0 if samples else POLL_INTERVAL_S)
            self._ask(stream)

    def _ask(self, stream: ResponseStream) -> None:
        while claimed := self.buffer.claim():
            for group in claimed:
                self._ask_for(group, stream)
        self.clock.set(self._sampling > 0)

    def _ask_for(self, group: Group, stream: ResponseStream) -> None:
        if not any(group.samples):
            self.files.fill(group, partial=self.partial, now=self.buffer.version)
        group.asked = set(group.results)
        if group.is_complete:
            self._decide(group)
            return
        missing = [index for index in range(len(group.samples)) if not group.is_finished(index)]
        parts = {index: _part(rollout) for index in missing if (rollout := group.samples[index]) is not None}
        self._sampling += len(missing)
        if missing:
            if group.step is None:
                seed = derive_seed(self.seed, group.number, "group")
            else:
                seed = prompt_seed(derive_seed(self.seed, group.step, "rollout"), group.place)
            self.problems = {group.number: group.problem}  # the main thread may forget ``running`` at any time
            stream.submit(group.number, group.prompt_ids, seed, len(group.samples), continued=parts, only=missing)
        self._ask_verifiers(group)

    def _receive(self, number: int, sample: int, response: Response) -> None:
        group = self.buffer.running.get(number)
        if group is None or group.is_finished(sample):
            return  # forgotten meanwhile
        self._sampling -= 1
        text = self.decode(response.response_ids.tolist()) if response.finish_reason != UNFINISHED else ""
        group.samples[sample] = Rollout.of(
            response, problem_id=group.problem.id, group=sample, prompt_ids=group.prompt_ids, text=text, reward=None
        )
        self.on_progress()
        self._ask_verifiers(group)

    def _ask_verifiers(self, group: Group) -> None:
        size = len(group.samples)
        ready = [index for index in range(size) if group.is_finished(index)]
        if self.task.scores_groups:
            ready = ready if len(ready) == size else []
            if len(group.results) < size and group.asked == set(group.results):
                group.asked.clear()  # responses from disk without an answer are judged with their whole group
                group.results.clear()
        for index in ready:
            rollout = group.samples[index]
            if index not in group.asked and rollout is not None:
                group.asked.add(index)
                self._scoring += 1
                answer = answer_of(rollout)
                self.task.submit((group.number, index), group.problem, answer, group=group.number, group_size=size)

    def _take_rewards(self, timeout_s: float) -> None:
        for key, result in self.task.poll(timeout_s):
            assert isinstance(key, tuple)
            self._scoring -= 1
            group = self.buffer.running.get(key[0])
            if group is None:
                continue
            group.score(key[1], result)
            self.on_progress()
            if group.is_complete:
                self._decide(group)

    def _decide(self, group: Group) -> None:
        if not (self.partial and self.buffer.is_full):
            self.buffer.decide(group)
        self.files.write(group)

    def _put_aside(self, stream: ResponseStream) -> None:
        with self.phase("rollout"):
            for result in stream.abort():
                self._receive(*result)
        self._sampling = 0
        with self.phase("reward"):
            while self._scoring:
                self._take_rewards(POLL_INTERVAL_S)
        for group in self.buffer.running.values():
            self.files.write(group)


def _part(rollout: Rollout) -> Response:
    others = rollout.versions, rollout.routed_experts, rollout.loss_mask, rollout.sampling_mask
    return Response(rollout.response_ids, rollout.sampler_logprobs, rollout.finish_reason, *others)
