"""Heartbeats: every few seconds each rank writes what it does as a JSON line into its own file."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from tepo_megatron.runtime.proc import process_state

INTERVAL_S = 2.0
"""Seconds between beats. A change of phase is written at once."""

STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank write its threads' stacks into :func:`stacks_path`. SIGUSR1 is Slurm's warning."""


@dataclass
class RankRecord:
    """A rank's report. Times are seconds since 1970; a watcher counts by ``beats`` and ``moves``, which never decrease."""

    rank: int
    world: int
    pid: int = 0
    started: int = 0
    host: str = ""
    time: float = 0.0
    beats: int = 0
    moves: int = 0
    """Number of signs of progress: a new phase, a micro-batch, an answer of a server."""
    moved_at: float = 0.0
    phase: str = "start"
    since: float = 0.0
    step: int = 0
    waits_for: str = ""
    passive: bool = False
    """Whether the rank waits for rank 0, and need not move until that does."""
    allowance_s: float = 0.0
    """Seconds that the phase's own time-outs add to ``hang_timeout_s``."""
    done: int = 0
    total: int = 0
    hang_timeout_s: float = 0.0
    ended: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def record_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def stacks_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.stacks"


class Heartbeat:
    """One rank's heartbeat, for its main thread. Nothing is written before :meth:`start`; no method waits for a disk.

    ``limits``: phase → seconds that the phase's own time-outs may need.
    """

    def __init__(
        self,
        folder: Path | None = None,
        rank: int = 0,
        world: int = 1,
        *,
        hang_timeout_s: float = 0.0,
        limits: Mapping[str, float] | None = None,
    ) -> None:
        self._folder, self._limits = folder, dict(limits or {})
        state = process_state(os.getpid())
        self._record = RankRecord(rank, world, os.getpid(), state.started if state else 0, socket.gethostname())
        self._record.since = self._record.moved_at = time.time()
        self._record.hang_timeout_s = hang_timeout_s
        self._changed, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._files: list[IO[Any]] = []
        self._longest = 0

    def start(self) -> None:
        """Rank 0 calls it first, holding the output folder; the others follow after a collective. Raises OSError if the folder
        cannot be written.
        """
        folder, rank = self._folder, self._record.rank
        if folder is None or self._thread is not None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            for old in folder.glob("rank-*"):
                old.unlink()
        file = record_path(folder, rank).open("wb", buffering=0)
        stacks = stacks_path(folder, rank).open("w")
        self._files = [file, stacks]
        if threading.current_thread() is threading.main_thread():
            faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        self._write(file)
        self._thread = threading.Thread(target=self._beat, args=(file,), name="heartbeat", daemon=True)
        self._thread.start()

    # -- what the rank does ------------------------------------------------------------------------------------------------

    def phase(self, name: str, *, waits_for: str = "", total: int = 0) -> None:
        """``waits_for``: whom the rank waits for; ``total``: number of items, if countable."""
        record = self._record
        record.phase, record.waits_for, record.done, record.total = name, waits_for, 0, total
        record.since, record.allowance_s = time.time(), self._limits.get(name, 0.0)
        self.moved()
        self._changed.set()

    def moved(self, done: int | None = None, total: int | None = None) -> None:
        """Reports progress within the phase; ``done``: finished items."""
        record = self._record
        record.moves += 1
        record.moved_at = time.time()
        record.done = record.done if done is None else done
        record.total = record.total if total is None else total

    def step(self, step: int) -> None:
        self._record.step = step

    def tell(self, **facts: Any) -> None:
        self._record.facts = {**self._record.facts, **facts}

    @contextlib.contextmanager
    def waiting(self, waits_for: str) -> Iterator[None]:
        """Context in which this rank waits for another one and cannot hang."""
        record = self._record
        before, record.waits_for, record.passive = record.waits_for, waits_for, True
        try:
            yield
        finally:
            record.waits_for, record.passive = before, False
            self.moved()

    def close(self, ended: str) -> None:
        """Writes the last beat. May be called twice, and before :meth:`start`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        self._changed.set()
        thread.join(INTERVAL_S)  # a disk that does not answer must not keep the rank
        self._record.ended = ended
        if not thread.is_alive():
            self._write(self._files[0])
        with contextlib.suppress(RuntimeError, ValueError):
            faulthandler.unregister(STACK_SIGNAL)
        for file in self._files:
            file.close()

    # -- the thread --------------------------------------------------------------------------------------------------------

    def _beat(self, file: IO[bytes]) -> None:
        while not self._stop.is_set():
            self._changed.wait(INTERVAL_S)
            self._changed.clear()
            self._write(file)

    def _write(self, file: IO[bytes]) -> None:
        record = self._record
        record.beats += 1
        record.time = time.time()
        data = json.dumps(asdict(record)).encode()
        # Filled up with spaces: cut to its length in a second call, the file would end with a part of a longer one in between.
        self._longest = max(self._longest, len(data))
        with contextlib.suppress(OSError):  # a full disk: the run needs no heartbeat, and the watch sees that it is silent
            os.pwrite(file.fileno(), data.ljust(self._longest) + b"\n", 0)


def read_records(folder: Path) -> list[RankRecord]:
    """Rank → its last record, without files that are damaged or of another version."""
    found = (_read(path) for path in sorted(folder.glob("rank-*.json")))
    return [record for record in found if record is not None]


def _read(path: Path) -> RankRecord | None:
    for _ in range(3):
        try:
            return RankRecord(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, TypeError):  # gone, of another version
            return None
        except ValueError:  # being written at this moment
            time.sleep(0.02)
    return None
