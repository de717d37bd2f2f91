"""A rank says what it does, for whoever watches: a line of JSON in a file of its own, written every few seconds."""

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
"""Seconds from one beat to the next. A change of phase is written within a fraction of that."""

STACK_SIGNAL = signal.SIGUSR2
"""Has a rank write the stacks of its threads into :func:`stacks_path`. (By SIGUSR1 Slurm warns of the end.)"""


@dataclass
class Record:
    """What a rank says. Times are seconds since 1970 on its machine's clock; who waits for a movement counts by ``beats`` and
    ``moves``, which no clock can set back.
    """

    rank: int
    world: int
    pid: int = 0
    started: int = 0
    """With ``pid`` names the process (``ProcessState.started``)."""
    host: str = ""
    time: float = 0.0
    beats: int = 0
    moves: int = 0
    """How often something went on: a new phase, a micro-batch, an answer of a server."""
    moved_at: float = 0.0
    phase: str = "start"
    since: float = 0.0
    """When the phase began."""
    step: int = 0
    waits_for: str = ""
    passive: bool = False
    """Whether the rank waits for rank 0, and need not move until that does."""
    allowance_s: float = 0.0
    """What the phase's own time-outs may take, beyond ``hang_timeout_s``."""
    done: int = 0
    total: int = 0
    hang_timeout_s: float = 0.0
    ended: str = ""
    """How the rank ended; empty while it runs, and after it was killed."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Rank 0: what it knows of the whole run."""


def record_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def stacks_path(folder: Path, rank: int) -> Path:
    """Where a rank writes its stacks when it gets ``STACK_SIGNAL``."""
    return folder / f"rank-{rank:05d}.stacks"


class Heartbeat:
    """One rank's. Silent until :meth:`start`; the methods cost next to nothing, and none of them waits for a disk.

    ``limits``: phase → seconds that its own time-outs may take. Used by the rank's main thread.
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
        self._record = Record(rank, world, os.getpid(), state.started if state else 0, socket.gethostname())
        self._record.since = self._record.moved_at = time.time()
        self._record.hang_timeout_s = hang_timeout_s
        self._changed, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._files: list[IO[Any]] = []
        self._longest = 0

    def start(self) -> None:
        """Begins to beat. Rank 0 calls it when the output folder is its own, and removes what ranks of an earlier run left;
        the others after they have met rank 0. Raises OSError if the folder cannot be written; does nothing the second time.
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
        """Another phase begins; ``waits_for`` names whom the rank waits for in it, ``total`` items if they can be counted."""
        record = self._record
        record.phase, record.waits_for, record.done, record.total = name, waits_for, 0, total
        record.since, record.allowance_s = time.time(), self._limits.get(name, 0.0)
        self.moved()
        self._changed.set()

    def moved(self, done: int | None = None, total: int | None = None) -> None:
        """Something of the phase went on; so many items of it are ``done``."""
        record = self._record
        record.moves += 1
        record.moved_at = time.time()
        record.done = record.done if done is None else done
        record.total = record.total if total is None else total

    def step(self, step: int) -> None:
        """So many steps are done."""
        self._record.step = step

    def tell(self, **facts: Any) -> None:
        """What rank 0 knows of the run, for ``tepo status``: anything that JSON carries."""
        self._record.facts = {**self._record.facts, **facts}

    @contextlib.contextmanager
    def waiting(self, waits_for: str) -> Iterator[None]:
        """Within, this rank waits for another, which may take as long as it works; it is no hang of this one."""
        record = self._record
        before, record.waits_for, record.passive = record.waits_for, waits_for, True
        try:
            yield
        finally:
            record.waits_for, record.passive = before, False
            self.moved()

    def close(self, ended: str) -> None:
        """The last word; safe to call twice, and before :meth:`start`."""
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


def read_records(folder: Path) -> list[Record]:
    """What the ranks said last, by rank. Files that hold no record are left out: damaged, or of another version."""
    found = (_read(path) for path in sorted(folder.glob("rank-*.json")))
    return [record for record in found if record is not None]


def _read(path: Path) -> Record | None:
    for _ in range(3):
        try:
            return Record(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, TypeError):  # gone, of another version
            return None
        except ValueError:  # being written at this moment
            time.sleep(0.02)
    return None
