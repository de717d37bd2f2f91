"""Watches this machine's ranks from their parent, and ends a run that hangs, with a report."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tepo_megatron.runtime.proc import STOPPED, ProcessState, children, command_line, descendants, wait_channel
from tepo_megatron.runtime.watch.heartbeat import STACK_SIGNAL, RankRecord, read_records, stacks_path

STOPPED_S = 30.0
"""Seconds after which a stopped rank counts as hanging: only another signal continues it."""

INTERVAL_S = 2.0

_STACKS_TIMEOUT_S = 10.0
"""Ranks write their stacks in milliseconds, unless the disk hangs."""

_STATES = {"R": "runs", "S": "sleeps", "D": "waits for a device or a disk", STOPPED: "stopped", "t": "traced", "Z": "ended"}


@dataclass(frozen=True)
class WatchedRank:
    process: ProcessState
    record: RankRecord | None


@dataclass(frozen=True)
class Hang:
    """``sentence`` names the ranks that hang, their phase, and since when; ``processes``: PIDs to kill."""

    processes: tuple[int, ...]
    sentence: str


@dataclass
class _Observed:
    moves: int = -1
    still_s: float = 0.0
    stopped_s: float = 0.0


@contextlib.contextmanager
def watching(status: Path | None, notify: Callable[[str], None]) -> Iterator[None]:
    """Context in which a thread watches this process's children, the ranks, by their heartbeats in ``status`` (None: no watch).

    If one hangs, it is killed, with a report in ``logs/hang-….txt`` next to ``status`` and a sentence to ``notify``. Whoever
    started the ranks ends the others.
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
    """Decides from heartbeats and process states which rank hangs.

    Only time between two checks counts, so that no rank is blamed after the parent was stopped or the machine slept.
    """

    def __init__(self) -> None:
        self._observed: dict[tuple[int, int], _Observed] = {}

    def check(self, ranks: Sequence[WatchedRank], elapsed_s: float) -> Hang | None:
        """``elapsed_s``: since the last check.

        A rank hangs if it is stopped for ``STOPPED_S`` (or a shorter ``hang_timeout_s``), or makes no move for
        ``hang_timeout_s`` and its phase's allowance, unless it waits for rank 0.
        """
        stopped: list[tuple[WatchedRank, float]] = []
        still: list[tuple[WatchedRank, float]] = []
        for rank in ranks:
            observed = self._observed.setdefault((rank.process.pid, rank.process.started), _Observed())
            record = rank.record
            observed.stopped_s = observed.stopped_s + elapsed_s if rank.process.state == STOPPED else 0.0
            if observed.stopped_s >= min(STOPPED_S, record.hang_timeout_s if record and record.hang_timeout_s else STOPPED_S):
                stopped.append((rank, observed.stopped_s))
            if record is None or record.ended or not record.hang_timeout_s:
                continue
            has_moved = record.moves != observed.moves or record.passive
            observed.moves, observed.still_s = record.moves, 0.0 if has_moved else observed.still_s + elapsed_s
            if observed.still_s >= record.hang_timeout_s + record.allowance_s:
                still.append((rank, observed.still_s))
        if stopped:  # other ranks that do not move wait for these
            return _hang(stopped, "is stopped (state T: SIGSTOP, SIGTSTP) for {:.0f} s")
        if still:
            limit = still[0][0].record.hang_timeout_s  # type: ignore[union-attr]
            return _hang(still, f"has not moved for {{:.0f}} s (train.hang_timeout_s = {limit:g})")
        return None


def _hang(ranks: Sequence[tuple[WatchedRank, float]], what: str) -> Hang:
    sentences = [f"{_name(rank)} {what.format(seconds)}{_activity(rank.record)}" for rank, seconds in ranks]
    # If another rank can be killed, rank 0 is left to end what it has started.
    others = [rank for rank, _ in ranks if rank.record is None or rank.record.rank]
    return Hang(tuple(rank.process.pid for rank in others or [rank for rank, _ in ranks]), "; ".join(sentences))


def _name(rank: WatchedRank) -> str:
    if rank.record is None:
        return f"process {rank.process.pid}, a rank that is still starting,"
    return f"rank {rank.record.rank} (process {rank.process.pid} on {rank.record.host})"


def _activity(record: RankRecord | None) -> str:
    if record is None:
        return ""
    waits = f", waiting for {record.waits_for}" if record.waits_for else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.moved_at))
    return f", in phase {record.phase} after {record.step} steps{waits}; its last move was at {since}"


def _watch(status: Path, notify: Callable[[str], None], stop: threading.Event) -> None:
    detector, last = HangDetector(), time.monotonic()
    while not stop.wait(INTERVAL_S):
        now = time.monotonic()
        # In a gap beyond two intervals this process did not run either.
        elapsed, last = min(now - last, 2 * INTERVAL_S), now
        hang = detector.check(_local_ranks(status), elapsed)
        if hang is not None:
            report = _write_report(status, hang)
            notify(f"{hang.sentence}. {report}. The job is ended; go on from its newest checkpoint with --resume")
            for pid in hang.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return


def _local_ranks(status: Path) -> list[WatchedRank]:
    records = {(record.pid, record.started): record for record in read_records(status)}
    return [WatchedRank(child, records.get((child.pid, child.started))) for child in children(os.getpid()) if child.alive]


def _write_report(status: Path, hang: Hang) -> str:
    """Returns the report's path, or why there is none: a hang must end even if nothing can be written."""
    path = status.parent / "logs" / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}.txt"
    try:
        text = _report(status, hang, _local_ranks(status))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"The report of what hangs could not be written: {error}"
    return f"The stacks of this machine's processes are in {path}"


def _report(status: Path, hang: Hang, ranks: Sequence[WatchedRank]) -> str:
    before = {rank.process.pid: _stacks_size(status, rank) for rank in ranks}
    asked = [rank for rank in ranks if rank.record is not None and not rank.record.ended and rank.process.state != STOPPED]
    for rank in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, STACK_SIGNAL)
    _wait_for_stacks(status, asked, before)
    parts = [f"{hang.sentence}\n{time.strftime('%Y-%m-%d %H:%M:%S')}, on {os.uname().nodename}\n"]
    parts += [_rank_report(status, rank) for rank in ranks]
    parts.append(
        "All processes below the one that watches, from /proc:\n" + "".join(map(_process_line, descendants(os.getpid())))
    )
    return "\n".join(parts)


def _rank_report(status: Path, rank: WatchedRank) -> str:
    if rank.record is None:
        return f"== process {rank.process.pid}: a rank that has not said anything yet\n{_process_line(rank.process)}"
    head = f"== rank {rank.record.rank}: {_record_line(rank.record)}\n{_process_line(rank.process)}"
    if rank.process.state == STOPPED:
        return head + "No stack: a stopped process runs no handler. The kernel's line above is all there is.\n"
    text = ""
    with contextlib.suppress(OSError):
        text = stacks_path(status, rank.record.rank).read_text(errors="replace")
    return head + (text or f"No stack: the process did not answer signal {STACK_SIGNAL} within {_STACKS_TIMEOUT_S:g} s.\n")


def _record_line(record: RankRecord) -> str:
    now = time.time()
    waits = f", waits for {record.waits_for}" if record.waits_for else ""
    count = f", {record.done} of {record.total} done" if record.total else ""
    return (
        f"phase {record.phase} for {now - record.since:.0f} s after {record.step} steps{waits}{count}; last move "
        f"{now - record.moved_at:.0f} s ago, last heartbeat {now - record.time:.0f} s ago"
    )


def _process_line(process: ProcessState) -> str:
    function = wait_channel(process.pid)
    waits = f" in {function}" if function else ""
    state = f"{process.state} ({_STATES.get(process.state, 'see proc(5)')}{waits})"
    command = command_line(process.pid).strip()[:200] or "(no command line)"
    return f"  process {process.pid}, child of {process.parent}, {state}: {command}\n"


def _stacks_size(status: Path, rank: WatchedRank) -> int:
    if rank.record is not None:
        with contextlib.suppress(OSError):
            return stacks_path(status, rank.record.rank).stat().st_size
    return 0


def _wait_for_stacks(status: Path, ranks: Sequence[WatchedRank], before: dict[int, int]) -> None:
    end, last = time.monotonic() + _STACKS_TIMEOUT_S, -1
    while time.monotonic() < end:
        sizes = [_stacks_size(status, rank) for rank in ranks]
        written = all(size > before[rank.process.pid] for size, rank in zip(sizes, ranks, strict=True))
        if written and sum(sizes) == last:
            return
        last = sum(sizes)
        time.sleep(0.1)
