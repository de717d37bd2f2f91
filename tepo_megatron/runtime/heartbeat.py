"""Each rank regularly writes what it does as a JSON line into its own file."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from tepo_megatron.runtime.files import try_writing
from tepo_megatron.runtime.proc import STOPPED, Process

INTERVAL_S = 2.0

_STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank write its stacks into ``_stacks_path``; SIGUSR1 is Slurm's."""


@dataclass
class RankRecord:
    """Times are seconds since 1970; ``beats`` and ``moves`` never decrease."""

    rank: int
    world: int
    pid: int = 0
    started: int = 0
    host: str = ""
    time: float = 0.0
    beats: int = 0
    moves: int = 0
    """Counts phases, micro-batches and servers' answers."""
    moved_at: float = 0.0
    phase: str = "start"
    since: float = 0.0
    step: int = 0
    waits_for: str = ""
    passive: bool = False
    """The rank waits for rank 0, and need not move."""
    allowance_s: float = 0.0  # added to hang_timeout_s by the phase's own time-outs
    done: int = 0
    total: int = 0
    hang_timeout_s: float = 0.0
    ended: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read_all(cls, folder: Path) -> list[RankRecord]:
        """Skips damaged files."""
        records = (cls.read(path) for path in sorted(folder.glob("rank-*.json")))
        return [record for record in records if record is not None]

    @classmethod
    def read(cls, path: Path) -> RankRecord | None:
        """None if there is none, or a damaged one."""
        for _ in range(3):
            try:
                record = cls(**json.loads(path.read_text(encoding="utf-8")))
                return record if record._is_sound() else None
            except (OSError, TypeError, RecursionError):  # gone, of another version
                return None
            except ValueError:  # being written at this moment
                time.sleep(0.02)
        return None

    def _is_sound(self) -> bool:
        for name, usual in vars(RankRecord(0, 1)).items():
            value = getattr(self, name)
            is_number = type(value) in (int, type(usual)) and isinstance(usual, int | float) and abs(value) < 2**53
            if not (is_number or (isinstance(value, type(usual)) and not isinstance(value, int | float))):
                return False
        return True


def _stacks_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.stacks"


def _record_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


class Heartbeat:
    """The main thread uses it, without waiting for a disk. ``limits``: phase → seconds of its own time-outs."""

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
        state = Process.read(os.getpid())
        self._record = RankRecord(rank, world, os.getpid(), state.started if state else 0, socket.gethostname())
        self._record.since = self._record.moved_at = time.time()
        self._record.hang_timeout_s = hang_timeout_s
        self._changed, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._files: list[IO[Any]] = []
        self._longest = 0

    def start(self) -> None:
        """Rank 0 calls first, holding the output folder, others after a collective. Raises OSError."""
        folder, rank = self._folder, self._record.rank
        if folder is None or self._thread is not None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            for old in folder.glob("rank-*"):
                old.unlink()
        file = _record_file(folder, rank).open("wb", buffering=0)
        stacks = _stacks_path(folder, rank).open("w")
        self._files = [file, stacks]
        if threading.current_thread() is threading.main_thread():
            faulthandler.register(_STACK_SIGNAL, file=stacks, all_threads=True)
        self._write()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    # -- what the rank does ------------------------------------------------------------------------------------------------

    def phase(self, name: str, *, waits_for: str = "") -> None:
        record = self._record
        record.phase, record.waits_for, record.done, record.total = name, waits_for, 0, 0
        record.since, record.allowance_s = time.time(), self._limits.get(name, 0.0)
        self.moved()
        self._changed.set()

    def moved(self, done: int | None = None, total: int | None = None) -> None:
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
        record = self._record
        before, record.waits_for, record.passive = record.waits_for, waits_for, True
        try:
            yield
        finally:
            record.waits_for, record.passive = before, False
            self.moved()

    def close(self, ended: str) -> None:
        """May be called twice, and before ``start``."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        self._changed.set()
        thread.join(INTERVAL_S)  # a disk that does not answer must not keep the rank
        self._record.ended = ended
        if not thread.is_alive():
            self._write()
        with contextlib.suppress(RuntimeError, ValueError):
            faulthandler.unregister(_STACK_SIGNAL)
        for file in self._files:
            file.close()

    # -- the thread --------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._stop.is_set():
            self._changed.wait(INTERVAL_S)
            self._changed.clear()
            with contextlib.suppress(OSError):  # tried again at the next beat
                self._make_again_if_removed()
            self._write()

    def _make_again_if_removed(self) -> None:
        """The run continues without its output folder, which rank 0 makes again; without records nothing would watch ranks."""
        folder = self._folder
        if folder is None or os.fstat(self._files[0].fileno()).st_nlink or not folder.parent.is_dir():
            return
        folder.mkdir(exist_ok=True)
        file = _record_file(folder, self._record.rank).open("xb", buffering=0)  # another run's stays
        self._files[0].close()
        self._files[0] = file

    def _write(self) -> None:
        record, file = self._record, self._files[0]
        record.beats += 1
        record.time = time.time()
        data = json.dumps(asdict(record)).encode()
        # Filled up with spaces: cut to its length in a second call, the file would end with a part of a longer one in between.
        self._longest = max(self._longest, len(data))
        with contextlib.suppress(OSError):  # a full disk: the run needs no heartbeat, and the watch sees that it is silent
            os.pwrite(file.fileno(), data.ljust(self._longest) + b"\n", 0)


STOPPED_S = 30.0
"""Only another signal continues a stopped rank."""

_STACKS_TIMEOUT_S = 10.0
"""Stacks take milliseconds, unless the disk hangs."""

_STATES = {"R": "runs", "S": "sleeps", "D": "waits for a device or a disk", STOPPED: "stopped", "t": "traced", "Z": "ended"}

WatchedRank = tuple[Process, RankRecord | None]
"""The record is None while the rank starts."""


@dataclass(frozen=True)
class _Hang:
    processes: tuple[int, ...]
    sentence: str
    is_silent: bool
    """No record was written either."""


@dataclass
class _Observed:
    moves: int = -1
    still_s: float = 0.0
    beats: int = -1
    silent_s: float = 0.0
    stopped_s: float = 0.0


@contextlib.contextmanager
def watching(status: Path | None, notify: Callable[[str], None]) -> Iterator[None]:
    """Kills a rank that hangs by its heartbeats in ``status`` (None: no watch), after a report to ``logs/hang-….txt`` beside
    it. Its starter ends the others.
    """
    if status is None:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(status, notify, stop), name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class HangDetector:
    """Counts only time between two checks, so that no rank is blamed after the machine slept."""

    def __init__(self) -> None:
        self._observed: defaultdict[tuple[int, int], _Observed] = defaultdict(_Observed)

    def check(self, ranks: Sequence[WatchedRank], elapsed_s: float) -> _Hang | None:
        """``elapsed_s`` is the time since the last check.

        A rank hangs if it is stopped for ``STOPPED_S`` (or a shorter ``hang_timeout_s``), or, unless it waits for rank 0, makes
        no move for ``hang_timeout_s`` and its phase's allowance.
        """
        stopped: list[tuple[WatchedRank, float]] = []
        still: list[tuple[WatchedRank, float]] = []
        has_beaten = False
        for process, record in ranks:
            observed = self._observed[process.pid, process.started]
            limit = record.hang_timeout_s if record else 0.0
            observed.stopped_s = observed.stopped_s + elapsed_s if process.state == STOPPED else 0.0
            if observed.stopped_s >= min(STOPPED_S, limit or STOPPED_S):
                stopped.append(((process, record), observed.stopped_s))
            if record is None or record.ended or not limit:
                continue
            has_moved = record.moves != observed.moves or record.passive
            observed.moves, observed.still_s = record.moves, 0.0 if has_moved else observed.still_s + elapsed_s
            has_written, observed.beats = record.beats != observed.beats, record.beats
            observed.silent_s = 0.0 if has_written else observed.silent_s + elapsed_s
            if observed.still_s >= limit + record.allowance_s:
                still.append(((process, record), observed.still_s))
                has_beaten |= observed.silent_s < min(STOPPED_S, limit)
        # If ranks are stopped, others that do not move wait for these.
        hanging = stopped or still
        if not hanging:
            return None
        what = "is stopped (state T: SIGSTOP, SIGTSTP) for {:.0f} s"
        if not stopped:
            what = "has not moved for {:.0f} s (train.hang_timeout_s = {:g})"
        sentences = [
            f"{_name(*rank)} {what.format(seconds, rank[1].hang_timeout_s if rank[1] else 0.0)}{_activity(rank[1])}"
            for rank, seconds in hanging
        ]
        # If another rank can be killed, rank 0 stays to end the processes that it started.
        others = [process.pid for (process, record), _ in hanging if record is None or record.rank]
        pids = tuple(others or [process.pid for (process, _), _ in hanging])
        return _Hang(pids, "; ".join(sentences), is_silent=not stopped and not has_beaten)


def _name(process: Process, record: RankRecord | None) -> str:
    if record is None:
        return f"process {process.pid}, a rank that is still starting,"
    return f"rank {record.rank} (process {process.pid} on {record.host})"


def _activity(record: RankRecord | None) -> str:
    if record is None:
        return ""
    waits = f", waiting for {record.waits_for}" if record.waits_for else ""
    count = f", {record.done} of {record.total} done" if record.total else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.moved_at))
    return f", in phase {record.phase} after {record.step} steps{waits}{count}; its last move was at {since}"


def _watch(status: Path, notify: Callable[[str], None], stop: threading.Event) -> None:
    detector, last = HangDetector(), time.monotonic()
    while not stop.wait(INTERVAL_S):
        now = time.monotonic()
        # In a gap beyond two intervals this process did not run either.
        elapsed, last = min(now - last, 2 * INTERVAL_S), now
        hang = detector.check(_local_ranks(status), elapsed)
        if hang is not None and hang.is_silent and not _can_write(status):
            detector = HangDetector()
        elif hang is not None:
            report = _write_report(status, hang)
            notify(f"{hang.sentence}. {report}")
            for pid in hang.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return


def _can_write(folder: Path) -> bool:
    try:
        try_writing(folder)
    except OSError:
        return False
    return True


def _local_ranks(status: Path) -> list[WatchedRank]:
    """Reads no other node's records: a job may have a thousand, on a slow disk."""
    result: list[WatchedRank] = []
    for child in Process.children(os.getpid()):
        if child.alive:
            rank = Process.environment(child.pid).get("RANK", "")
            record = RankRecord.read(_record_file(status, int(rank))) if rank.isdecimal() else None
            is_its = record is not None and (record.pid, record.started) == (child.pid, child.started)
            result.append((child, record if is_its else None))
    return result


def _write_report(status: Path, hang: _Hang) -> str:
    """A hang must end even if nothing can be written."""
    path = status.parent / "logs" / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}.txt"
    ranks = _local_ranks(status)
    _request_stacks(status, [r for p, r in ranks if r is not None and not r.ended and p.state != STOPPED])
    below = "".join(map(_process_line, Process.below(os.getpid())))
    parts = [
        f"{hang.sentence}\n{time.strftime('%Y-%m-%d %H:%M:%S')}, on {os.uname().nodename}\n",
        *(_rank_report(status, *rank) for rank in ranks),
        f"All processes below the one that watches, from /proc:\n{below}",
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(parts), encoding="utf-8")
    except OSError as error:
        return f"The report of what hangs could not be written: {error}"
    return f"The stacks of this machine's processes are in {path}"


def _request_stacks(status: Path, records: Sequence[RankRecord]) -> None:
    def sizes() -> list[int]:
        paths = [_stacks_path(status, record.rank) for record in records]
        return [path.stat().st_size if path.exists() else 0 for path in paths]

    before, last = sizes(), list[int]()
    for record in records:
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, _STACK_SIGNAL)
    end = time.monotonic() + _STACKS_TIMEOUT_S
    while time.monotonic() < end:
        now = sizes()
        if now == last and all(size > old for size, old in zip(now, before, strict=True)):
            return
        last = now
        time.sleep(0.1)


def _rank_report(status: Path, process: Process, record: RankRecord | None) -> str:
    head = f"== {_name(process, record)}{_activity(record)}\n{_process_line(process)}"
    if record is None:
        return head
    if process.state == STOPPED:
        return head + "No stack: a stopped process runs no handler. The kernel's line above is all there is.\n"
    text = ""
    with contextlib.suppress(OSError):
        text = _stacks_path(status, record.rank).read_text(errors="replace")
    return head + (text or f"No stack: the process did not answer signal {_STACK_SIGNAL} within {_STACKS_TIMEOUT_S:g} s.\n")


def _process_line(process: Process) -> str:
    function = Process.wait_channel(process.pid)
    waits = f" in {function}" if function else ""
    state = f"{process.state} ({_STATES.get(process.state, 'see proc(5)')}{waits})"
    command = Process.command_line(process.pid).strip()[:200] or "(no command line)"
    return f"  process {process.pid}, child of {process.parent}, {state}: {command}\n"
