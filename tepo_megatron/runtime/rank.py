"""What a rank of a run does beside its work: signals and exit codes, and one sentence of what went wrong.

A rank was started by ``torchrun.run_ranks``, by ``python -m tepo_megatron.runtime.torchrun``, or by ``torchrun`` by hand.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from tepo_megatron.errors import describe, is_ours, wants_traceback
from tepo_megatron.runtime.preemption import (
    INTERRUPTED,
    STOP_SIGNALS,
    StopRequested,
    exit_code,
    install_stop_signals,
    stop_signals,
)
from tepo_megatron.runtime.rendezvous import refuse_dynamic_rendezvous, refuse_pickles, remove_folders

_LEAVE_S = 2.0
"""How long a rank that was asked to stop waits at the end for its threads, which may wait for servers that go on without it."""

_REPORTED = "_tepo_reported"
"""Attribute of an error that was said already."""

FAILURE_FILE = "TEPO_FAILURE_FILE"
"""Environment: where the first rank that fails writes its sentence; set by ``torchrun.run_ranks``."""


def under_torchrun() -> bool:
    """Whether this process is a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def speaks_first() -> bool:
    """Whether this process is the one that says what all would say: the parent, or rank 0 of a ``torchrun`` by hand."""
    return not under_torchrun() or (os.environ["RANK"] == "0" and FAILURE_FILE not in os.environ)


def is_restart() -> bool:
    """Whether torchrun has started this rank again, after a failure (its ``--max-restarts``)."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def run_rank(work: Callable[[], None], *, grace_s: float, warning_s: float) -> int:
    """Runs ``work()`` as one rank of a world; returns the exit code.

    SIGINT, SIGTERM and SIGUSR1 raise ``StopRequested`` as ``StopSignals`` says. After one rank 0 ends with 130 or 75, the
    others with 0: the agent would end rank 0 with the first that says something else.
    """
    code = _run(work, grace_s, warning_s)
    if _in_a_group():
        _exit_now(code)
    return code


def _run(work: Callable[[], None], grace_s: float, warning_s: float) -> int:
    signals = install_stop_signals(grace_s=grace_s, warning_s=warning_s)
    _end_with_parent()
    try:
        refuse_dynamic_rendezvous()
        refuse_pickles()
        work()
    except StopRequested as stop:
        return _leave(stop.exit_code if os.environ["RANK"] == "0" else 0)
    except Exception as error:
        if signals.requested is not None and not signals.at_risk():
            return _leave(exit_code(signals.requested))  # what failed was on its way out
        _report(error)
        return 1
    return 0


def report_before_leaving(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    """For an ``ExitStack``, pushed last: says what this rank fails of while its peers are still there. A process that was not
    started as a rank has none, and its caller gets the error.

    Once it has let go of them they fail too, of a closed connection, and would be the first to say so.
    """
    del kind, trace
    signals = stop_signals()
    if under_torchrun() and isinstance(error, Exception) and (signals.requested is None or signals.at_risk()):
        _report(error)


def run_until_interrupted(work: Callable[[], None]) -> int:
    """Runs ``work()`` in this process, which Ctrl-C and SIGTERM end in an orderly way; returns the exit code."""
    install_stop_signals(numbers=(signal.SIGINT, signal.SIGTERM))
    try:
        work()
    except StopRequested:
        return INTERRUPTED
    return 0


def print_error(text: str) -> None:
    """One sentence on standard error."""
    sys.stderr.write(f"error: {text}\n")
    sys.stderr.flush()


def _report(error: Exception) -> None:
    """Says what this rank failed of: to ``launch`` if it listens and no rank was first, else to standard error."""
    if getattr(error, _REPORTED, False):
        return
    setattr(error, _REPORTED, True)
    sentence = describe(error) if is_ours(error) else f"rank {os.environ['RANK']}: {describe(error)}"
    first = _claim(sentence)
    if wants_traceback() or (first and not is_ours(error)):
        traceback.print_exception(error)
    if FAILURE_FILE not in os.environ:
        print_error(sentence)


def _claim(sentence: str) -> bool:
    """Writes the sentence for ``launch``; whether this rank was the first, or nobody listens."""
    if FAILURE_FILE not in os.environ:
        return True
    try:
        with open(os.environ[FAILURE_FILE], "x", encoding="utf-8") as file:
            file.write(sentence)
    except FileExistsError:
        return False
    return True


def _leave(code: int) -> int:
    """Returns the exit code once no thread keeps the interpreter, or ends the process with it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # one more would end an interpreter that is closing with another code
    end = time.monotonic() + _LEAVE_S
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                _exit_now(code)
    return code


def _in_a_group() -> bool:
    """Whether torch's default process group is still there, as after a failure in the middle of making an engine.

    Python's end beside gloo's threads may abort ("terminate called without an active exception"), and a rank that SIGABRT ended
    would be taken for the first that failed.
    """
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _exit_now(code: int) -> NoReturn:
    """Ends the process without the interpreter's own end, for which threads may not be ready."""
    remove_folders()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent() -> None:
    """On Linux, has the kernel send SIGTERM to this rank if the agent that ``launch`` runs dies without a word."""
    if sys.platform == "linux" and FAILURE_FILE in os.environ:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
