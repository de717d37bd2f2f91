"""Samples ahead of the trainer, in a thread of rank 0: groups are drawn, sampled, rewarded, and wait for their turn.

The servers' weights change under it; a response says of each token which ones drew it. What breaks ends the stream of samples,
and waits for the main thread, which alone revives servers and sends weights: after that all that was begun is asked for again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Response
from tepo_megatron.run.sampling.utilization import BusyClock
from tepo_megatron.sampler.protocol import ServerDied
from tepo_megatron.tasks.protocol import RewardResult, Task

LOOK_S = 0.2
"""How often each side looks whether the other has changed something."""

VERDICT_S = 0.02
"""How often the thread looks whether a verifier has answered, where nothing else happens."""


class Stream(Protocol):
    """Samples as they finish; ``Sampler.sample_stream`` gives one."""

    def submit(self, key: int, prompt_ids: Sequence[int], seed: int, n: int) -> None: ...
    def next(self, timeout_s: float) -> tuple[int, int, Response] | None:
        """(key, number of the sample in its group, response) of what has finished; None if nothing did within the time."""


OpenStream = Callable[[Callable[[], None]], AbstractContextManager[Stream]]
"""Opens a stream, which calls what it is given when a server was seen to make tokens."""


@dataclass(eq=False)
class Group:
    """The samples of one problem. ``number``: its place in the order in which problems are drawn, from which its seed comes.

    ``begun``: the weights' step when it was asked for.
    """

    number: int
    problem: Problem
    prompt: tuple[int, ...]
    begun: int = 0
    responses: dict[int, Response] = field(default_factory=dict)
    texts: dict[int, ResponseText] = field(default_factory=dict)
    results: dict[int, RewardResult] = field(default_factory=dict)
    """Of the responses, by their numbers."""

    @property
    def oldest(self) -> int:
        """The step of the oldest weights that drew one of its tokens."""
        return min(version.step for response in self.responses.values() for _, version in response.versions)


class AheadSampler:
    """The thread and what it works on. All methods but those with an underscore are the main thread's.

    ``open_stream`` opens a stream of samples, and ``open_verifiers`` what rewards them; both are the thread's own. ``draw``
    gives the next group; the thread calls it under the lock that :meth:`locked` takes. ``seed`` and ``read`` give a group's
    seed and a response's text. ``accept`` refuses complete groups that are not to be trained on. ``samples``: of a group.
    ``max_staleness``: groups that are older when their turn comes are dropped; None: none is.
    """

    def __init__(
        self,
        open_stream: OpenStream,
        open_verifiers: Callable[[], Task],
        draw: Callable[[], Group],
        seed: Callable[[Group], int],
        read: Callable[[Response], ResponseText],
        accept: Callable[[Group], bool],
        *,
        samples: int,
        max_staleness: int | None,
    ) -> None:
        self._open_stream, self._open_verifiers = open_stream, open_verifiers
        self._draw, self._seed, self._read, self._accept = draw, seed, read, accept
        self._samples, self._max_staleness = samples, max_staleness
        self._verifiers: Task | None = None
        self._changed = threading.Condition()
        self._waiting: deque[Group] = deque()
        self._running: dict[int, Group] = {}
        self._done: list[Group] = []
        self._version = self._turn = self._room = 0
        self._round = 0
        """Counts what makes all that runs worthless: a stream is for one round."""
        self._ready, self._closed = False, False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self.moves = 0
        """Changes whenever something moves: tokens, samples, rewards."""
        self.dropped = 0
        """Groups that were too old, since the count was last set to 0."""
        self.clock = BusyClock()

    # -- the main thread ---------------------------------------------------------------------------------------------------

    @property
    def verifiers(self) -> Task | None:
        """What rewards the samples; None before the first."""
        return self._verifiers

    def locked(self) -> AbstractContextManager[object]:
        """Within, the thread draws nothing."""
        return self._changed

    def allow(self, turn: int, room: int) -> None:
        """The next groups that are taken are for step ``turn``; ``room`` of them may be there, in whatever state."""
        with self._changed:
            self._turn, self._room = turn, room
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sample-ahead", daemon=True)
            self._thread.start()

    def published(self, version: int) -> None:
        """All servers have the weights of this step, and sample: what was begun is asked for again where it broke."""
        with self._changed:
            self._version, self._ready = version, True
            if isinstance(self._error, ServerDied):
                self._error = None
            self._changed.notify_all()

    def take(self, count: int, step: int, on_wait: Callable[[], None]) -> list[Group]:
        """``count`` complete groups for ``step``, those of the oldest weights first, in the order in which they were drawn;
        those behind them are for the next step. Waits for them, and calls ``on_wait`` meanwhile.

        Raises what broke in the thread; a server's death only where it must.
        """
        with self._changed:
            while True:
                self._drop_old(step)
                enough = len(self._done) >= count
                if self._error is not None and not (enough and isinstance(self._error, ServerDied)):
                    error, self._error = self._error, None
                    raise error
                if enough:
                    break
                self._changed.wait(LOOK_S)
                on_wait()
            chosen = sorted(self._done, key=lambda group: (group.oldest, group.number))[:count]
            self._done = [group for group in self._done if group not in chosen]
            self._turn = step + 1
            self._room -= count  # what is taken makes no room as long as the weights are the same
            self._changed.notify_all()
        return sorted(chosen, key=lambda group: group.number)

    def give_back(self, groups: Iterable[Group]) -> None:
        """They were taken or removed, and not trained on."""
        with self._changed:
            for group in groups:
                (self._done if group.results else self._waiting).append(group)

    def add(self, groups: Iterable[Group]) -> None:
        """They are sampled before what is drawn."""
        with self._changed:
            self._waiting.extend(groups)

    def remove(self, problem: str) -> Group | None:
        """Takes the oldest group of this problem that is not being sampled yet; None where there is none."""
        with self._changed:
            found = next((group for group in self._waiting if group.problem.id == problem), None)
            if found is not None:
                self._waiting.remove(found)
            return found

    def pending(self) -> list[Group]:
        """All that was drawn and not taken, in the order in which it was drawn. Within :meth:`locked`."""
        return sorted([*self._waiting, *self._running.values(), *self._done], key=lambda group: group.number)

    def forget(self) -> None:
        """All that was drawn is given up, and what runs ended."""
        with self._changed:
            self._waiting.clear()
            self._running.clear()
            self._done.clear()
            self._round += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread, as soon as it looks; safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(10 * LOOK_S)
        if self._verifiers is not None:
            self._verifiers.close()

    # -- the thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait_for_servers():
            try:
                with self._open_stream(self._moved) as stream:
                    self._pump(stream)
            except Exception as error:  # the main thread raises it
                with self._changed:
                    self._error, self._ready = error, False
                    self._changed.notify_all()
            finally:
                self.clock.set(False)

    def _moved(self) -> None:
        self.moves += 1

    def _wait_for_servers(self) -> bool:
        """Returns when there is something to do; whether there is: not after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._ready)
            return not self._closed

    def _pump(self, stream: Stream) -> None:
        with self._changed:
            current = self._round
            for group in reversed(self._running.values()):  # of a stream that broke: drawn again, whole
                group.responses.clear()
                group.texts.clear()
                group.results.clear()
                self._waiting.appendleft(group)
            self._running.clear()
        self._verifiers = verifiers = self._verifiers or self._open_verifiers()
        verifiers.reset()
        while True:
            with self._changed:
                if self._closed or self._round != current:
                    return
                begun = self._begin()
            for group in begun:
                stream.submit(group.number, group.prompt, self._seed(group), self._samples)
            owed = any(len(group.responses) < self._samples for group in self._running.values())
            self.clock.set(owed)
            if owed and (found := stream.next(VERDICT_S if verifiers.unfinished else LOOK_S)) is not None:
                self._verify(verifiers, *found)
            elif not owed and not verifiers.unfinished:
                self._wait_for_room(current)
            for key, result in verifiers.poll(0.0 if owed else LOOK_S):
                self._finish(key, result)

    def problem_of(self, number: int) -> Problem:
        """Of a group that runs. The thread's own."""
        return self._running[number].problem

    def _wait_for_room(self, current: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._round != current or self._has_room(), LOOK_S)

    def _begin(self) -> list[Group]:
        """The groups that are to be asked for now."""
        begun = []
        while self._has_room():
            group = self._waiting.popleft() if self._waiting else self._draw()
            group.begun = self._version
            self._running[group.number] = group
            begun.append(group)
        return begun

    def _has_room(self) -> bool:
        return self._live() + len(self._done) < self._room

    def _live(self) -> int:
        """Groups that run, and will not be too old."""
        if self._max_staleness is None:
            return len(self._running)
        return sum(self._turn - group.begun <= self._max_staleness for group in self._running.values())

    def _verify(self, verifiers: Task, number: int, sample: int, response: Response) -> None:
        self.moves += 1
        group = self._running.get(number)
        if group is None:
            return  # it was given up
        group.responses[sample] = response
        group.texts[sample] = self._read(response)
        verifiers.submit((number, sample), group.problem, group.texts[sample], group=number, group_size=self._samples)

    def _finish(self, key: Hashable, result: RewardResult) -> None:
        self.moves += 1
        assert isinstance(key, tuple)
        number, sample = key
        group = self._running.get(number)
        if group is None:
            return
        group.results[sample] = result
        if len(group.results) < self._samples:
            return
        accepted = self._accept(group)
        with self._changed:
            if self._running.pop(number, None) is not None and accepted:
                self._done.append(group)
            self._changed.notify_all()

    def _drop_old(self, step: int) -> None:
        if self._max_staleness is None:
            return
        fresh = [group for group in self._done if step - group.oldest <= self._max_staleness]
        if len(fresh) < len(self._done):
            self.dropped += len(self._done) - len(fresh)
            self._done = fresh
            self._changed.notify_all()
