"""Watches the ranks of this machine from the process that started them, and ends a job that hangs, with a report."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tepo_megatron.runtime.proc import children
from tepo_megatron.runtime.watch.hang_report import hang_report
from tepo_megatron.runtime.watch.heartbeat import read_records
from tepo_megatron.runtime.watch.verdict import Hang, Rank, Verdict

INTERVAL_S = 2.0


@contextlib.contextmanager
def watching(status: Path | None, say: Callable[[str], None]) -> Iterator[None]:
    """Within, a thread of this process watches its children, the ranks, whose heartbeats are in ``status`` (nothing without).

    Where one hangs, a report is written to ``logs/hang-….txt`` beside ``status``, ``say`` gets one sentence, and the rank is
    killed: whoever started the ranks then ends the others as it does after any death.
    """
    if status is None:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(status, say, stop), name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def ranks_here(status: Path) -> list[Rank]:
    """This process' children that live, with their records. What a rank of an earlier run has left is nobody's."""
    records = {(record.pid, record.started): record for record in read_records(status)}
    return [Rank(child, records.get((child.pid, child.started))) for child in children(os.getpid()) if child.alive]


def _watch(status: Path, say: Callable[[str], None], stop: threading.Event) -> None:
    verdict, last = Verdict(), time.monotonic()
    while not stop.wait(INTERVAL_S):
        now = time.monotonic()
        # A gap beyond two intervals is time in which this process did not look either.
        elapsed, last = min(now - last, 2 * INTERVAL_S), now
        hang = verdict.look(ranks_here(status), elapsed)
        if hang is not None:
            report = _write_report(status, hang)
            say(f"{hang.sentence}. {report}. The job is ended; go on from its newest checkpoint with --resume")
            for pid in hang.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return


def _write_report(status: Path, hang: Hang) -> str:
    """Where the report is, or why it is nowhere: a hang must end also where nothing can be written."""
    name = f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}.txt"
    path = status.parent / "logs" / name
    try:
        text = hang_report(status, hang, ranks_here(status))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"The report of what hangs could not be written: {error}"
    return f"The stacks of this machine's processes are in {path}"
