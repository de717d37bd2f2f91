"""Spreads requests over servers, watches their progress, and asks again where an answer fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from tepo_megatron.rollout.client import Client
from tepo_megatron.rollout.faults import ServerFault, ServerGone, ServerSilent
from tepo_megatron.rollout.progress import ProgressWatch, interval_s

R = TypeVar("R")
A = TypeVar("A")

FIRST_PAUSE_S = 0.1
"""Before a request is asked again for the first time; the pause doubles each time, up to LAST_PAUSE_S."""

LAST_PAUSE_S = 5.0


@dataclass
class Lane:
    """One server that samples. ``healthy`` asks whether it says that it works; ``index`` is its number in the fleet.

    Its requests wait in threads of its own: those of a server that hangs must not keep the others' from starting.
    """

    index: int
    client: Client
    pool: ThreadPoolExecutor
    healthy: Callable[[], bool]
    waiting: int = 0
    faults: int = 0
    """In a row."""
    lost: bool = False


@dataclass
class _Try(Generic[R]):
    request: R
    lane: Lane
    faults: int = 0
    """How often the request has failed, for whatever reason but the loss of its server."""


@dataclass
class Dispatcher(Generic[R, A]):
    """Requests to the servers of ``lanes``. ``ask(client, request)`` runs in their threads, the rest in the caller's.

    A request that fails is asked again, of another server where there is one, at most ``max_retries`` times; so may a server
    fail in a row. Beyond that, when it is gone, or silent for ``timeout_s``, the server is lost: ``lose(lane, cause)`` is
    called, which ends it and may raise to end everything, and its requests go to the others. The last one's loss is raised.
    ``on_move`` is called when a server was seen to make tokens.
    """

    lanes: Sequence[Lane]
    ask: Callable[[Client, R], A]
    lose: Callable[[Lane, ServerFault], None]
    timeout_s: float
    max_retries: int
    on_move: Callable[[], None] = lambda: None
    retried: int = 0
    """Requests that were asked again, each as often as it was."""
    _pending: dict[Future[A], _Try[R]] = field(default_factory=dict)
    _done: SimpleQueue[Future[A]] = field(default_factory=SimpleQueue)

    def run(self, requests: Sequence[R]) -> Iterator[tuple[R, A]]:
        """Each request with its answer, as they come. Raises what ``ask`` raises for a request that is at fault itself."""
        watches = {  # each of this call only: what was seen before means nothing
            lane.index: ProgressWatch(lane.client.progress, self.timeout_s, on_move=self.on_move) for lane in self.lanes
        }
        try:
            for number, request in enumerate(requests):
                self._submit(_Try(request, self.lanes[number % len(self.lanes)]))
            while self._pending:
                with suppress(Empty):
                    yield from self._settle(self._done.get(timeout=interval_s(self.timeout_s)), watches)
                for lane in self.lanes:
                    if lane.waiting and not lane.lost and (why := watches[lane.index].look()):
                        self._lose(lane, ServerSilent(f"{lane.client.url}: {why}", url=lane.client.url))
        finally:
            for future in self._pending:  # those that have not begun; the others end with their servers, or by themselves
                future.cancel()
            for watch in watches.values():
                watch.close()

    def _settle(self, future: Future[A], watches: dict[int, ProgressWatch]) -> Iterator[tuple[R, A]]:
        attempt = self._pending.pop(future, None)
        if attempt is None:
            return  # its server was lost, and it was asked again
        lane = attempt.lane
        lane.waiting -= 1
        watches[lane.index].moved()
        try:
            answer = future.result()
        except ServerFault as error:
            self._failed(attempt, error)
        else:
            lane.faults = 0
            yield attempt.request, answer

    def _failed(self, attempt: _Try[R], error: ServerFault) -> None:
        lane = attempt.lane
        lane.faults += 1
        attempt.faults += 1
        self.retried += 1
        if isinstance(error, ServerGone | ServerSilent) or max(lane.faults, attempt.faults) > self.max_retries:
            self._lose(lane, error)
        attempt.lane = self._next(lane)
        self._submit(attempt)

    def _lose(self, lane: Lane, cause: ServerFault) -> None:
        lane.lost = True
        left = {future: attempt for future, attempt in self._pending.items() if attempt.lane is lane}
        for future in left:
            future.cancel()
            del self._pending[future]
        self.lose(lane, cause)
        if all(other.lost for other in self.lanes):
            raise cause
        for attempt in left.values():
            attempt.lane = self._next(lane)
            self.retried += 1
            self._submit(attempt)

    def _next(self, after: Lane) -> Lane:
        """The server with the fewest requests; another one than before where there is one."""
        return min((lane for lane in self.lanes if not lane.lost), key=lambda lane: (lane is after, lane.waiting))

    def _submit(self, attempt: _Try[R]) -> None:
        attempt.lane.waiting += 1
        future = attempt.lane.pool.submit(self._ask, attempt.lane, attempt.request, attempt.faults)
        self._pending[future] = attempt
        future.add_done_callback(self._done.put)

    def _ask(self, lane: Lane, request: R, faults: int) -> A:
        if faults:
            time.sleep(min(FIRST_PAUSE_S * 2 ** (faults - 1), LAST_PAUSE_S))
        try:
            return self.ask(lane.client, request)
        except (ServerGone, ServerSilent):
            raise
        except ServerFault as error:
            if lane.healthy():
                raise
            raise ServerGone(str(error), url=error.url) from error
