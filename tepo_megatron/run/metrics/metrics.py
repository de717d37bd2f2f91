"""A run's rows of metrics on disk, and the time split of its steps."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tepo_megatron.runtime.files import Failed, LogFile, raise_error, read_lines, write_atomically

PHASES = ("rollout", "reward", "journal", "score", "update", "sync", "eval")
"""Phases of a step for ``Stopwatch``, in order."""


class MetricsWriter:
    """Appends rows to ``metrics.jsonl`` and, if asked, TensorBoard events to ``tensorboard``. Rank 0 only.

    Non-finite numbers become ``null``. If a file cannot be written, ``failed`` is called, and the rest is written with the next
    row.
    """

    def __init__(self, output: Path, tensorboard: bool, failed: Failed = raise_error) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self._path = output / "metrics.jsonl"
        self._file = LogFile(self._path, failed)
        self._failed = failed
        self.last_step: int | None = None
        self.cut = False
        self._events_folder = output / "tensorboard" if tensorboard else None
        self._events: EventsFile | None = None
        self._path.touch()
        rows, self.cut = _read_rows(self._path)
        self._rewrite(rows)

    @property
    def waiting(self) -> int:
        return self._file.waiting

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """``step`` comes first, and is the step of the TensorBoard scalars."""
        finite = {key: _finite(value) for key, value in row.items() if key != "step"}
        # One write of a whole line: a crash cuts a line off, and never mixes two.
        self._file.append((json.dumps({"step": step, **finite}) + "\n").encode())
        self.last_step = step
        events = self._open_events()
        if events is not None:
            events.add_scalars(step, {key: value for key, value in finite.items() if value is not None})

    def truncate_after(self, step: int) -> None:
        """Drops the rows beyond ``step``; TensorBoard hides later events."""
        self._rewrite([row for row in read_metrics(self._path) if row["step"] <= step] if self._path.exists() else [])
        self._events = None
        events = self._open_events()
        if events is not None:
            events.hide_from(step + 1)

    def close(self) -> None:
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        self.last_step = rows[-1]["step"] if rows else None
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if self._path.exists() and self._path.read_bytes() != text.encode():
            write_atomically(self._path, text)

    def _open_events(self) -> EventsFile | None:
        if self._events is None and self._events_folder is not None:
            self._events = EventsFile(self._events_folder, self._failed)
        return self._events


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the rows, without a last line that a crash cut off. Raises ValueError for other malformed lines."""
    return _read_rows(path)[0]


def _read_rows(path: Path) -> tuple[list[dict[str, Any]], bool]:
    lines, cut = read_lines(path)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not a row of metrics: {error}; remove the line") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(f"{path}:{number}: not a row of metrics: an object with an integer 'step' was expected")
        rows.append(row)
    return rows, cut


class Stopwatch:
    """Splits the wall time of a step into phases.

    An inner phase stops the outer one's clock. ``clock``: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open: list[str] = []
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._start = self._mark = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context: its time belongs to ``name``, one of ``PHASES``; raises ValueError for others."""
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
        return self._clock() - self._start

    def split(self) -> dict[str, float]:
        """Returns seconds since the last call as ``time/<phase>``, ``time/other``, ``time/step``; resets them."""
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
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] += now - self._mark
        self._mark = now
        return now


def _finite(value: float) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


_NUMBERS = itertools.count()


class EventsFile:
    def __init__(self, folder: Path, failed: Failed) -> None:
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file = LogFile(folder / name, failed)

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve (tag → value) at ``step``."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._append(step=step, summary=Summary(value=points))

    def hide_from(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._append(step=step, session_log=SessionLog(status=SessionLog.START))

    def _append(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        events = [Event(wall_time=time.time(), **event)]
        if not self._file.path.exists():
            events.insert(0, Event(wall_time=time.time(), step=event["step"], file_version="brain.Event:2"))
        piece = io.BytesIO()
        writer = RecordWriter(piece)
        for each in events:
            writer.write(each.SerializeToString())
        self._file.append(piece.getvalue())
