"""Samples and rewards of a step's groups, joined as they finish: each response goes to its verifier at once.

The servers are a :class:`Stream`, the verifiers a ``Task``; both hand out what is finished one by one.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tepo_megatron.core.rollout import Response, Rollout
from tepo_megatron.run.sampling.groups import UNFINISHED, Group, StepGroups
from tepo_megatron.run.sampling.step_rewards import answer_of
from tepo_megatron.run.step.minibatches import derive_seed
from tepo_megatron.sampler.sampling import prompt_seed
from tepo_megatron.tasks.protocol import Task

LOOK_S = 1.0
"""How long one wait for a response or a reward lasts at most."""

_GLANCE_S = 0.02
"""The same where the other side may have something first."""


class Stream(Protocol):
    """Requests for samples, whose responses come as they finish; ``Sampler.sample_stream`` gives one."""

    def submit(
        self,
        key: Hashable,
        prompt_ids: Sequence[int],
        seed: int,
        n: int,
        *,
        continued: Mapping[int, Response],
        only: Sequence[int],
    ) -> None:
        """Asks for these of a prompt's ``n`` samples; those in ``continued`` go on behind the parts of them."""

    def next(self, timeout_s: float) -> tuple[Hashable, int, Response] | None:
        """A finished response with its key and number, whole where it was continued; None where none came in time."""

    def abort(self) -> Iterable[tuple[Hashable, int, Response]]:
        """Ends what is unfinished: parts of it with a token, their ``finish_reason`` ``abort``, and what has just finished."""


class Places(Protocol):
    """Where groups lie between processes (``carry_over.GroupStore``)."""

    def fill(self, group: Group, *, partial: bool) -> bool: ...
    def write(self, group: Group) -> None: ...


@dataclass
class Gathering:
    """One step's way to its groups. ``draw`` draws what the step misses; ``decode`` makes text of token ids; ``moved`` is told
    (groups kept, groups needed) whenever something has come; ``phase`` is entered as ``rollout`` while servers sample, and as
    ``reward`` while only verifiers work.
    """

    groups: StepGroups
    stream: Stream
    verifiers: Task
    store: Places
    draw: Callable[[], list[Group]]
    decode: Callable[[Sequence[int]], str]
    seed: int
    wanted: int
    partial: bool = False
    moved: Callable[[int, int], None] = lambda done, total: None
    phase: Callable[[str], contextlib.AbstractContextManager[None]] = lambda name: contextlib.nullcontext()
    _sampling: int = 0
    """Responses that servers owe."""
    _begun: deque[Group] = field(default_factory=deque)
    _owed: int = 0
    """Answers that verifiers owe."""

    def run(self) -> None:
        """Returns when the step is done. Raises what stream, verifiers and filters raise; groups keep what they have then."""
        self.verifiers.reset()
        for group in self.groups.open.values():
            group.asked = set(group.results)
        self._begun.extend(self.groups.open.values())
        with self.phase("rollout"):
            self._begin()
        while not self.groups.done:
            assert self._sampling or self._owed, "something is to come as long as a group is open"
            with self.phase("rollout" if self._sampling else "reward"):
                self._wait()
        if self.partial:
            self._put_aside()

    def _wait(self) -> None:
        """Takes what comes until the step is done, or another side is waited for."""
        samples = self._sampling > 0
        while (self._sampling > 0) == samples and not self.groups.done:
            if samples:
                self._take_response(self.stream.next(_GLANCE_S if self._owed else LOOK_S))
            self._take_rewards(0.0 if samples else LOOK_S)

    def _begin(self) -> None:
        """Asks for what the begun groups lack; one that an earlier process had is decided at once, and may begin others."""
        while self._begun:
            group = self._begun.popleft()
            if not any(group.samples):
                self.store.fill(group, partial=self.partial)
            if group.complete:
                self._decide(group)
                continue
            lacking = [at for at in range(len(group.samples)) if not group.finished(at)]
            parts = {at: _part(rollout) for at in lacking if (rollout := group.samples[at]) is not None}
            seed = prompt_seed(derive_seed(self.seed, group.step, "rollout"), group.place)
            self._sampling += len(lacking)
            self.stream.submit(group.number, group.prompt_ids, seed, len(group.samples), continued=parts, only=lacking)
            self._ask_verifiers(group)

    def _take_response(self, found: tuple[Hashable, int, Response] | None) -> None:
        if found is not None:
            self._ask_verifiers(self._note(*found))

    def _note(self, key: Hashable, sample: int, response: Response) -> Group:
        """Puts a response, or a part of one, into its group."""
        assert isinstance(key, int)
        group, whole = self.groups.open[key], response.finish_reason != UNFINISHED
        self._sampling -= 1
        group.samples[sample] = Rollout.of(
            response,
            problem_id=group.problem.id,
            group=sample,
            prompt_ids=group.prompt_ids,
            text=self.decode(response.response_ids.tolist()) if whole else "",
            reward=None,
        )
        self._moved()
        return group

    def _ask_verifiers(self, group: Group) -> None:
        """Gives verifiers what they have not got yet of what is finished; one of groups gets a group when all of it is."""
        size = len(group.samples)
        ready = [at for at in range(size) if group.finished(at)]
        if self.verifiers.scores_groups:
            ready = ready if len(ready) == size else []
            if len(group.results) < size and group.asked == set(group.results):
                group.asked.clear()  # what came back from disk without an answer is judged with its whole group
        for at in ready:
            rollout = group.samples[at]
            if at not in group.asked and rollout is not None:
                group.asked.add(at)
                self._owed += 1
                answer = answer_of(rollout)
                self.verifiers.submit((group.number, at), group.problem, answer, group=group.number, group_size=size)

    def _take_rewards(self, timeout_s: float) -> None:
        for key, result in self.verifiers.poll(timeout_s):
            assert isinstance(key, tuple)
            self._owed -= 1
            group = self.groups.open[key[0]]
            group.score(key[1], result)
            self._moved()
            if group.complete:
                self._decide(group)
                self._begin()

    def _decide(self, group: Group) -> None:
        if not self.groups.full or not self.partial:
            self.groups.decide(group)
        self.store.write(group)
        # At once: what is drawn must not depend on how many groups were decided meanwhile.
        self._begun.extend(self.draw())

    def _put_aside(self) -> None:
        """What is unfinished keeps its tokens; what is finished gets its reward."""
        with self.phase("rollout"):
            for found in self.stream.abort():
                self._take_response(found)
        self._sampling = 0
        with self.phase("reward"):
            while self._owed:
                self._take_rewards(LOOK_S)
        for group in self.groups.open.values():
            self.store.write(group)

    def _moved(self) -> None:
        self.moved(min(len(self.groups.kept), self.wanted), self.wanted)


def _part(rollout: Rollout) -> Response:
    return Response(
        rollout.response_ids,
        rollout.sampler_logprobs,
        rollout.finish_reason,
        rollout.versions,
        rollout.routed_experts,
        rollout.loss_mask,
        rollout.sampling_mask,
    )
