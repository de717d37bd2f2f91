"""Decides from heartbeats and the kernel's word which rank hangs. No clock of its own, so that nothing but time spent looking
counts: a parent that was stopped itself, or a machine that slept, accuses nobody afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tepo_megatron.runtime.proc import STOPPED, ProcessState
from tepo_megatron.runtime.watch.heartbeat import Record

STOPPED_S = 30.0
"""Seconds after which a rank that a signal has stopped counts as hanging: nothing but a signal will have it go on."""


@dataclass(frozen=True)
class Rank:
    """A rank of this machine: its process, and what it said last (None before its first word)."""

    process: ProcessState
    record: Record | None


@dataclass(frozen=True)
class Hang:
    """``sentence`` says which ranks hang, in which phase, since when; ``processes`` are those to end."""

    processes: tuple[int, ...]
    sentence: str


@dataclass
class _Seen:
    moves: int = -1
    still_s: float = 0.0
    stopped_s: float = 0.0


class Verdict:
    """Remembers what each rank was seen to do."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], _Seen] = {}

    def look(self, ranks: Sequence[Rank], elapsed_s: float) -> Hang | None:
        """The ranks as they are now, ``elapsed_s`` after the last look; the hang, if there is one.

        A rank hangs that is stopped for ``STOPPED_S`` (or its ``hang_timeout_s``, if that is less), or that made no move for
        ``hang_timeout_s`` and what its phase's own time-outs allow. One that waits for rank 0 need not move.
        """
        stopped: list[tuple[Rank, float]] = []
        still: list[tuple[Rank, float]] = []
        for rank in ranks:
            seen = self._seen.setdefault((rank.process.pid, rank.process.started), _Seen())
            record = rank.record
            seen.stopped_s = seen.stopped_s + elapsed_s if rank.process.state == STOPPED else 0.0
            if seen.stopped_s >= min(STOPPED_S, record.hang_timeout_s if record and record.hang_timeout_s else STOPPED_S):
                stopped.append((rank, seen.stopped_s))
            if record is None or record.ended or not record.hang_timeout_s:
                continue
            moved = record.moves != seen.moves or record.passive
            seen.moves, seen.still_s = record.moves, 0.0 if moved else seen.still_s + elapsed_s
            if seen.still_s >= record.hang_timeout_s + record.allowance_s:
                still.append((rank, seen.still_s))
        if stopped:  # whoever else does not move waits for these
            return _hang(stopped, "is stopped (state T: SIGSTOP, SIGTSTP) for {:.0f} s")
        if still:
            limit = still[0][0].record.hang_timeout_s  # type: ignore[union-attr]
            return _hang(still, f"has not moved for {{:.0f}} s (train.hang_timeout_s = {limit:g})")
        return None


def _hang(found: Sequence[tuple[Rank, float]], what: str) -> Hang:
    words = [f"{_name(rank)} {what.format(seconds)}{_doing(rank.record)}" for rank, seconds in found]
    # Rank 0 ends what it has started if it can, and it can when a rank that it waits for is gone.
    others = [rank for rank, _ in found if rank.record is None or rank.record.rank]
    return Hang(tuple(rank.process.pid for rank in others or [rank for rank, _ in found]), "; ".join(words))


def _name(rank: Rank) -> str:
    if rank.record is None:
        return f"process {rank.process.pid}, a rank that is still starting,"
    return f"rank {rank.record.rank} (process {rank.process.pid} on {rank.record.host})"


def _doing(record: Record | None) -> str:
    if record is None:
        return ""
    waits = f", waiting for {record.waits_for}" if record.waits_for else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.moved_at))
    return f", in phase {record.phase} after {record.step} steps{waits}; its last move was at {since}"
