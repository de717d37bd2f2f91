from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn

from tepo_megatron.errors import describe, is_ours, wants_traceback
from tepo_megatron.runtime.machine import Machine, variable
from tepo_megatron.runtime.preemption import STOP_SIGNALS, StopRequested, StopSignals
from tepo_megatron.runtime.proc import Process
from tepo_megatron.runtime.rendezvous import refuse_pickles, removals
from tepo_megatron.runtime.text import echo

_LEAVE_S = 2.0  # for threads, which may wait for servers

_REPORTED = "_tepo_reported"

FAILURE_FILE = "TEPO_FAILURE_FILE"
"""The first failing rank of a machine writes its report here."""

STARTER = "TEPO_STARTER"
"""Process id of the agent."""

HAS_PARENT = "TEPO_HAS_PARENT"
"""Is set if this machine has all ranks: their parent has checked the run, and prints the report."""


class FailureReport(NamedTuple):
    """``is_ours``: the sentence is for the user."""

    sentence: str
    is_ours: bool

    @classmethod
    def read(cls, path: Path) -> FailureReport | None:
        """None: no rank failed by an error."""
        with suppress(FileNotFoundError, ValueError):  # ValueError: the rank was killed while it wrote
            return cls(*json.loads(path.read_bytes()))
        return None


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def speaks_first() -> bool:
    """Is true in the parent, and in rank 0 if ``torchrun`` was called by hand."""
    return not under_torchrun() or (os.environ["RANK"] == "0" and HAS_PARENT not in os.environ)


def run_rank(work: Callable[[], None], *, grace_s: float, warning_s: float) -> int:
    """Returns the exit code.

    After a stop signal it is 130 or 75 in a node's first rank and 0 in others, since the agent ends that rank at the first
    other code. An agent without a failed rank would wait for those of other nodes.
    """
    code = _run(work, grace_s, warning_s)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        _exit_now(code)  # Python's exit with gloo's threads may abort, and hide the first failed rank
    return code


def _run(work: Callable[[], None], grace_s: float, warning_s: float) -> int:
    signals = StopSignals(grace_s=grace_s, warning_s=warning_s)
    try:
        signals.install()
        if FAILURE_FILE in os.environ:  # the agent's end is this rank's
            Process.end_with(variable(STARTER, os.getppid()))
        refuse_pickles()
        Machine.raise_open_files()
        try:
            work()
        finally:
            signals.defer()  # one more signal raises nothing in what follows, up to the interpreter's own end
    except StopRequested as stop:
        return _leave(stop.exit_code if os.environ.get("LOCAL_RANK", os.environ["RANK"]) == "0" else 0)
    except (Exception, SystemExit) as error:
        if signals.requested is not None and not signals.at_risk() and not getattr(error, _REPORTED, False):
            return _leave(StopRequested(signals.requested).exit_code)  # the error follows from the stop
        _report(error)
        return 1
    return 0


def report_before_leaving(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    """Reports this rank's error before peers fail of the closed connection."""
    del kind, trace
    signals = StopSignals.current()
    if under_torchrun() and isinstance(error, Exception | SystemExit) and (signals.requested is None or signals.at_risk()):
        _report(error)


def print_error(text: str) -> None:
    echo(f"error: {text}", err=True)


def _report(error: BaseException) -> None:
    if getattr(error, _REPORTED, False):
        return
    setattr(error, _REPORTED, True)
    sentence = describe(error) if is_ours(error) else f"rank {os.environ['RANK']}: {describe(error)}"
    first = _claim(FailureReport(sentence, is_ours(error)))
    if wants_traceback() or ((first or HAS_PARENT not in os.environ) and not is_ours(error)):
        echo("".join(traceback.format_exception(error)).removesuffix("\n"), err=True)
    if HAS_PARENT not in os.environ:
        print_error(sentence)


def _claim(report: FailureReport) -> bool:
    if FAILURE_FILE not in os.environ:
        return True
    try:
        with open(os.environ[FAILURE_FILE], "x", encoding="ascii") as file:
            json.dump(report, file)
    except FileExistsError:
        return False
    except OSError:  # as on a full disk: the parent finds no report
        if HAS_PARENT in os.environ:
            print_error(report.sentence)
    return True


def _leave(code: int) -> int:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # one more would end an interpreter that is closing with another code
    end = time.monotonic() + _LEAVE_S
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                _exit_now(code)
    return code


def _exit_now(code: int) -> NoReturn:
    """Threads may not be ready for the interpreter's exit."""
    removals.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
