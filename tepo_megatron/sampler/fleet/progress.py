from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tepo_megatron.sampler.vllm.client import ServerGone, ServerSilent

_PROBES = 20
_MAX_INTERVAL_S = 5.0


class ProgressWatch:
    """Counts only time in which this process ran. Only one thread uses it.

    ``probe`` runs in another thread and raises ServerSilent or ServerGone.
    """

    def __init__(
        self,
        probe: Callable[[], object],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_move: Callable[[], None] = lambda: None,
    ) -> None:
        self._probe, self._timeout_s, self._clock, self._on_move = probe, timeout_s, clock, on_move
        self.interval_s = min(_MAX_INTERVAL_S, timeout_s / _PROBES)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="progress")
        self._answer: Future[object] | None = None
        self._probed_at = self._checked_at = clock()
        self._last: object = None
        self._silent_s = 0.0
        self._gone = 0

    def note_progress(self) -> None:
        """Call it when the server answers a request, or gets its first one."""
        self._silent_s, self._checked_at, self._gone = 0.0, self._clock(), 0

    def look(self) -> str:
        """Returns why the server counts as dead, or ""."""
        now = self._clock()
        self._silent_s += min(now - self._checked_at, 2 * self.interval_s)
        self._checked_at = now
        if self._answer is not None and self._answer.done():
            gone = self._take(self._answer)
            self._answer = None
            if gone:
                return gone
        if self._answer is None and now - self._probed_at >= self.interval_s:
            self._answer, self._probed_at = self._thread.submit(self._probe), now
        if self._silent_s < self._timeout_s:
            return ""
        return f"no new token of any request within {self._timeout_s:g} s (rollout.server.request_timeout_s)"

    def _take(self, answer: Future[object]) -> str:
        try:
            state = answer.result()
        except ServerSilent:
            return ""
        except ServerGone as error:
            self._gone += 1  # one connection may fail for other reasons
            return str(error) if self._gone > 1 else ""
        if state is not None and state != self._last:
            self._last = state
            self.note_progress()
            self._on_move()
        return ""

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
