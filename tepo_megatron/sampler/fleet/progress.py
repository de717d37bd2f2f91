"""Notices that a server which owes answers makes no progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tepo_megatron.sampler.vllm.client.connection import ServerGone, ServerSilent

LOOKS = 20
"""How often a server is asked within the time-out, at least."""

MOST_BETWEEN_S = 5.0


def interval_s(timeout_s: float) -> float:
    """How often to look at a server that may be silent for ``timeout_s``."""
    return min(MOST_BETWEEN_S, timeout_s / LOOKS)


class ProgressWatch:
    """Asks one server ``probe`` again and again, and counts the time since its answer last changed.

    Only time in which this process ran is counted: after a suspended machine or a stopped trainer nobody is to blame. ``probe``
    runs in a thread of its own, raises ServerSilent when nobody answers, and ServerGone when the server is known to be dead.
    ``on_move`` is called within :meth:`look` when its answer has changed. Used by one thread.
    """

    def __init__(
        self,
        probe: Callable[[], object],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_move: Callable[[], None] = lambda: None,
    ) -> None:
        self._probe, self._timeout_s, self._clock, self._on_move = probe, timeout_s, clock, on_move
        self._between = interval_s(timeout_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="progress")
        self._asked: Future[object] | None = None
        self._asked_at = self._looked_at = clock()
        self._seen: object = None
        self._silent_s = 0.0
        self._gone = 0

    def moved(self) -> None:
        """The server has answered a request, or has just got its first one."""
        self._silent_s, self._looked_at, self._gone = 0.0, self._clock(), 0

    def look(self) -> str:
        """Why the server counts as dead; empty as long as it does not. Call it about every ``interval_s``."""
        now = self._clock()
        self._silent_s += min(now - self._looked_at, 2 * self._between)
        self._looked_at = now
        if self._asked is not None and self._asked.done():
            gone = self._take(self._asked)
            self._asked = None
            if gone:
                return gone
        if self._asked is None and now - self._asked_at >= self._between:
            self._asked, self._asked_at = self._thread.submit(self._probe), now
        if self._silent_s < self._timeout_s:
            return ""
        return f"no new token of any request within {self._timeout_s:g} s (rollout.server.request_timeout_s)"

    def _take(self, asked: Future[object]) -> str:
        try:
            seen = asked.result()
        except ServerSilent:
            return ""
        except ServerGone as error:
            self._gone += 1  # one connection may fail for other reasons
            return str(error) if self._gone > 1 else ""
        if seen is not None and seen != self._seen:
            self._seen = seen
            self.moved()
            self._on_move()
        return ""

    def close(self) -> None:
        """Ask no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
