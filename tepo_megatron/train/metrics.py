"""What a run measures: one row a step on disk, and where the step's time went."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PHASES = ("rollout", "reward", "score", "update", "sync", "eval")
"""The phases of a step that ``Stopwatch`` knows, in the order in which they happen."""


class MetricsWriter:
    """Appends the rows of a run to ``<output>/metrics.jsonl`` and, if asked, to TensorBoard events in ``<output>/tensorboard``.

    Rank 0 only. A row is one line, written at once: a reader finds it whole or not at all. Numbers that are not finite become
    ``null``. A last line that a crash cut off is removed when the file is opened again.
    """

    def __init__(self, output: Path, tensorboard: bool) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self._path = output / "metrics.jsonl"
        self.last_step: int | None = None
        """The step of the last row."""
        self._events_folder = output / "tensorboard" if tensorboard else None
        self._events: SummaryWriter | None = None
        if self._path.exists():
            self._rewrite(read_metrics(self._path))
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Appends one row; ``step`` is put first, and is also the step of the TensorBoard scalars, whose tags are the keys."""
        finite = {key: _finite(value) for key, value in row.items() if key != "step"}
        # One write of a whole line: a crash cuts a line off, and never mixes two.
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        self.last_step = step
        events = self._open_events()
        if events is not None:
            for key, value in finite.items():
                if value is not None:
                    events.add_scalar(key, value, step)
            events.flush()

    def truncate_after(self, step: int) -> None:
        """Drops the rows beyond ``step``, from which a run is resumed; TensorBoard hides its events from there on."""
        self._file.close()
        self._rewrite([row for row in read_metrics(self._path) if row["step"] <= step])
        self._file = self._path.open("a", encoding="utf-8", buffering=1)
        if self._events is not None:
            self._events.close()
            self._events = None
        self._open_events(purge_from=step + 1)

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()
            self._events = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        """Replaces the file in one move, so that a crash leaves the old one or the new one."""
        self.last_step = rows[-1]["step"] if rows else None
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if self._path.read_text(encoding="utf-8") == text:
            return
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self._path)

    def _open_events(self, purge_from: int | None = None) -> SummaryWriter | None:
        if self._events is None and self._events_folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(self._events_folder), purge_step=purge_from)
        return self._events


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``, in file order; a last line without its end, cut off by a crash, is left out.

    Raises:
        ValueError: a line that is not a JSON object with an integer ``step``.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not a row of metrics: {error}; remove the line") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(f"{path}:{number}: not a row of metrics: an object with an integer 'step' was expected")
        rows.append(row)
    return rows


class Stopwatch:
    """Splits the wall time of a step into phases.

    Phases exclude each other: a phase that is opened inside another one stops the outer clock until it ends. What no phase
    covers is ``other``. ``clock`` gives seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open: list[str] = []
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._start = self._mark = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time spent inside goes to ``name``, one of ``PHASES``; a ``ValueError`` for any other."""
        if name not in self._seconds:
            raise ValueError(f"phase {name!r} is not known; known phases: {', '.join(PHASES)}")
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def elapsed(self) -> float:
        """Seconds since the last :meth:`split`, or the start."""
        return self._clock() - self._start

    def split(self) -> dict[str, float]:
        """Seconds since the last call (or the start) as ``time/<phase>``, ``time/other``, ``time/step``; starts anew."""
        now = self._charge()
        step = now - self._start
        split = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        # The sum of the parts can pass the whole by rounding.
        split["time/other"] = max(0.0, step - sum(self._seconds.values()))
        split["time/step"] = step
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._start = now
        return split

    def _charge(self) -> float:
        """Gives the time since the last mark to the innermost open phase."""
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] += now - self._mark
        self._mark = now
        return now


def _finite(value: float) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None
