"""TensorBoard's event files, written row by row. Its own writer uses a thread, which a full disk ends with a traceback."""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tepo_megatron.runtime.files import Failed, LogFile

_NUMBERS = itertools.count()


class EventsFile:
    """One file of events in ``folder``, which appears with its first event; rank 0 only."""

    def __init__(self, folder: Path, failed: Failed) -> None:
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file = LogFile(folder / name, failed)

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A point of each curve (tag → value) at ``step``."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._append(step=step, summary=Summary(value=points))

    def hide_from(self, step: int) -> None:
        """TensorBoard hides what earlier files of the folder have of this step and later ones."""
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
