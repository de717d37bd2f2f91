"""How long the servers of a run had something to sample, for its idle shares."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class BusyClock:
    """Seconds in which the servers have something to sample. For several threads; ``clock`` gives seconds, never goes back."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._busy, self._holds = False, 0
        self._seconds, self._mark = 0.0, clock()

    def set(self, busy: bool) -> None:
        """From now on they have something, or nothing."""
        with self._lock:
            self._charge()
            self._busy = busy

    def hold(self) -> None:
        """From now on they cannot sample: they take weights, or work for another."""
        with self._lock:
            self._charge()
            self._holds += 1

    def release(self) -> None:
        with self._lock:
            self._charge()
            self._holds -= 1

    def take(self) -> float:
        """The seconds since the last call; starts anew."""
        with self._lock:
            self._charge()
            seconds, self._seconds = self._seconds, 0.0
            return seconds

    def _charge(self) -> None:
        now = self._clock()
        if self._busy and not self._holds:
            self._seconds += now - self._mark
        self._mark = now
