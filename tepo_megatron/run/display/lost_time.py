"""What faults cost a run: seconds lost by cause, a column each in the metrics, and all of it in a few lines at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tepo_megatron.run.display.figures import duration

COUNTED = {
    "update/skipped": "optimizer steps skipped",
    "servers/restarts": "rollout servers started again",
    "servers/timeouts": "rollout servers given up that hung",
    "requests/retried": "requests asked again",
    "reward/failed": "rewards failed",
    "rollback/count": "returns to a checkpoint",
}
"""Columns that count faults, in words; a run has those that it can meet."""

LOST = {
    "lost/skipped": "in steps that were skipped",
    "lost/server": "until a server was there again",
    "lost/resume": "in steps that a resumed run repeated",
    "lost/rollback": "in steps that a return to a checkpoint undid",
}
"""Columns of seconds that brought nothing, in words."""


class LostTime:
    """Rank 0's account of a step. ``clock`` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lost = dict.fromkeys(LOST, 0.0)

    def add(self, cause: str, seconds: float) -> None:
        """Adds to one of ``LOST``."""
        self._lost[cause] += seconds

    @contextlib.contextmanager
    def if_in_vain(self, cause: str) -> Iterator[Callable[[], None]]:
        """The time within counts as lost where the function that it gives was called."""
        start, in_vain = self._clock(), False

        def call() -> None:
            nonlocal in_vain
            in_vain = True

        try:
            yield call
        finally:
            if in_vain:
                self.add(cause, self._clock() - start)

    def split(self) -> dict[str, float]:
        """The columns since the last call; starts anew."""
        lost, self._lost = self._lost, dict.fromkeys(LOST, 0.0)
        return lost


def fault_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What went wrong over all rows, a line each with a number; none where nothing did."""
    counts = {text: sum(row.get(key) or 0 for row in rows) for key, text in COUNTED.items()}
    lost = {text: sum(row.get(key) or 0 for row in rows) for key, text in LOST.items()}
    lines = [f"{count:.0f} {text}" for text, count in counts.items() if count]
    return lines + [f"{duration(seconds)} lost {text}" for text, seconds in lost.items() if seconds]
