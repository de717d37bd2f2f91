"""Follows ``metrics.jsonl`` and remembers which of its rows a logger has. Imports no client."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tepo_megatron.runtime.files import read_lines

Log = Callable[[int, int, Mapping[str, Any]], None]
"""Takes how many rows were logged before, also those that were taken back later; the row's step; the row."""


class SentRows:
    """The file ``OUT/wandb/sent.jsonl`` or ``OUT/mlflow/sent.jsonl``: the id of the run over there, then for every row that was
    logged its step and its checksum. It outlives the process, so that a resumed run goes on where it ended.
    """

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a file that is none of these; a last line that a crash cut off is dropped."""
        self.path = path
        self.run_id: str | None = None
        self.count = 0
        """Rows that were logged, those that were done again counted again."""
        self.rows: list[tuple[int, int]] = []
        """Step and checksum of those that still count: the steps rise."""
        if path.exists():
            self._read()

    def _read(self) -> None:
        lines, cut = read_lines(self.path)
        if cut:
            with self.path.open("rb+") as file:
                file.truncate(sum(len(line.encode()) + 1 for line in lines))
        try:
            if lines:
                self.run_id = str(json.loads(lines[0])["id"])
            for line in lines[1:]:
                step, checksum = json.loads(line)
                self._note(int(step), int(checksum))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{self.path} is damaged ({error!r}); remove it to begin another run over there") from error

    def begin(self, run_id: str) -> None:
        """Keeps the id of a run that is new over there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"id": run_id}) + "\n")
        self.run_id = run_id

    def add(self, step: int, checksum: int) -> None:
        """Keeps that a row was logged; those of this step and of later ones no longer count. A file that was removed with the
        folder is begun again.
        """
        if not self.path.exists():
            self.begin(str(self.run_id))
        with self.path.open("a") as file:
            file.write(json.dumps([step, checksum]) + "\n")
        self._note(step, checksum)

    def _note(self, step: int, checksum: int) -> None:
        while self.rows and self.rows[-1][0] >= step:
            self.rows.pop()
        self.rows.append((step, checksum))
        self.count += 1


class Follower:
    """Reads the rows that were appended to a file since it looked last, also where the file was replaced by a shorter one, as
    when a run goes back to a checkpoint.
    """

    def __init__(self, path: Path, sent: SentRows) -> None:
        self._path = path
        self._sent = sent
        self._file: BinaryIO | None = None
        self._offset = 0
        self._row = 0
        """How many rows lie before the offset."""

    def pass_on(self, log: Log) -> None:
        """Logs every row that is not logged yet, oldest first. What ``log`` raises passes; that row is the first next time."""
        if not self._open():
            return
        assert self._file is not None
        self._file.seek(self._offset)
        while (line := self._file.readline()).endswith(b"\n"):
            row = json.loads(line)
            found = (row["step"], zlib.crc32(line))
            if self._sent.rows[self._row : self._row + 1] != [found]:
                log(self._sent.count, row["step"], row)
                self._sent.add(*found)
            self._row += 1
            self._offset += len(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> bool:
        """Whether there is a file. One that was replaced is read from its beginning: the open one keeps the number of its inode
        from being used again.
        """
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        if self._file is not None and os.fstat(self._file.fileno()).st_ino != found.st_ino:
            self.close()
        if self._file is None or found.st_size < self._offset:
            self.close()
            self._file = self._path.open("rb")
            self._offset = self._row = 0
        return True
