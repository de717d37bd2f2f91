"""What a hang looks like from outside: each rank's word, its stacks, and the kernel's word on every process below this one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from tepo_megatron.runtime.proc import STOPPED, ProcessState, command_line, descendants, wait_channel
from tepo_megatron.runtime.watch.heartbeat import STACK_SIGNAL, Record, stacks_path
from tepo_megatron.runtime.watch.verdict import Hang, Rank

PATIENCE_S = 10.0
"""How long the ranks have for their stacks; it takes them milliseconds, unless the disk is what hangs."""

_LETTERS = {"R": "runs", "S": "sleeps", "D": "waits for a device or a disk", STOPPED: "stopped", "t": "traced", "Z": "ended"}


def hang_report(status: Path, hang: Hang, ranks: Sequence[Rank]) -> str:
    """The text. ``ranks`` are asked for their stacks; those of a stopped process cannot be had, and the report says so."""
    before = {rank.process.pid: _size(status, rank) for rank in ranks}
    asked = [rank for rank in ranks if rank.record is not None and not rank.record.ended and rank.process.state != STOPPED]
    for rank in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, STACK_SIGNAL)
    _wait_for_stacks(status, asked, before)
    parts = [f"{hang.sentence}\n{time.strftime('%Y-%m-%d %H:%M:%S')}, on {os.uname().nodename}\n"]
    parts += [_of_rank(status, rank) for rank in ranks]
    parts.append("All processes below the one that watches, from /proc:\n" + "".join(map(_line, descendants(os.getpid()))))
    return "\n".join(parts)


def _of_rank(status: Path, rank: Rank) -> str:
    if rank.record is None:
        return f"== process {rank.process.pid}: a rank that has not said anything yet\n{_line(rank.process)}"
    head = f"== rank {rank.record.rank}: {_says(rank.record)}\n{_line(rank.process)}"
    if rank.process.state == STOPPED:
        return head + "No stack: a stopped process runs no handler. The kernel's line above is all there is.\n"
    text = ""
    with contextlib.suppress(OSError):
        text = stacks_path(status, rank.record.rank).read_text(errors="replace")
    return head + (text or f"No stack: the process did not answer signal {STACK_SIGNAL} within {PATIENCE_S:g} s.\n")


def _says(record: Record) -> str:
    now = time.time()
    waits = f", waits for {record.waits_for}" if record.waits_for else ""
    count = f", {record.done} of {record.total} done" if record.total else ""
    return (
        f"phase {record.phase} for {now - record.since:.0f} s after {record.step} steps{waits}{count}; last move "
        f"{now - record.moved_at:.0f} s ago, last heartbeat {now - record.time:.0f} s ago"
    )


def _line(state: ProcessState) -> str:
    function = wait_channel(state.pid)
    waits = f" in {function}" if function else ""
    letter = f"{state.state} ({_LETTERS.get(state.state, 'see proc(5)')}{waits})"
    command = command_line(state.pid).strip()[:200] or "(no command line)"
    return f"  process {state.pid}, child of {state.parent}, {letter}: {command}\n"


def _size(status: Path, rank: Rank) -> int:
    if rank.record is not None:
        with contextlib.suppress(OSError):
            return stacks_path(status, rank.record.rank).stat().st_size
    return 0


def _wait_for_stacks(status: Path, ranks: Sequence[Rank], before: dict[int, int]) -> None:
    """Returns when all have written and none writes on."""
    end, last = time.monotonic() + PATIENCE_S, -1
    while time.monotonic() < end:
        sizes = [_size(status, rank) for rank in ranks]
        written = all(size > before[rank.process.pid] for size, rank in zip(sizes, ranks, strict=True))
        if written and sum(sizes) == last:
            return
        last = sum(sizes)
        time.sleep(0.1)
