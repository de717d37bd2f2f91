"""The ranks of a run on one machine: started and ended together, with one sentence about what went wrong.

``launch`` is the parent's side: it runs the agent that the ``torchrun`` command runs. ``run_rank`` is what each rank does,
started by ``launch`` or by ``torchrun`` by hand.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from tepo_megatron.errors import describe, is_ours, wants_traceback
from tepo_megatron.rendezvous import refuse_dynamic_rendezvous, refuse_pickles, run_agent

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from tepo_megatron.config import RunConfig

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells give it."""

_REPORTED = "_tepo_reported"
"""Attribute of an error that was said already."""

_FAILURE_FILE = "TEPO_FAILURE_FILE"
"""Environment: where the first rank that fails writes its sentence; set by ``launch``."""


def under_torchrun() -> bool:
    """Whether this process is a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def speaks_first() -> bool:
    """Whether this process is the one that says what all would say: the parent, or rank 0 of a ``torchrun`` by hand."""
    return not under_torchrun() or (os.environ["RANK"] == "0" and _FAILURE_FILE not in os.environ)


def launch(arguments: Sequence[str], world_size: int, module: str = "tepo_megatron") -> int:
    """Runs ``python -m <module>`` with ``arguments`` as ``world_size`` ranks of this machine; returns the exit code.

    A signal (Ctrl-C, SIGTERM) goes to every rank, and this returns when they have ended. If a rank fails, the others are
    ended, and the first one's sentence is printed last. The ranks meet in a private file and talk over the loopback interface.
    """
    with tempfile.TemporaryDirectory(prefix="tepo-") as folder:
        failure = Path(folder) / "failure.txt"
        try:
            with _environment(failure):
                code, fallback = _run_agent(["-m", module, *arguments], world_size, Path(folder))
        except KeyboardInterrupt:
            code = INTERRUPTED
        _show_cursor()
        if code not in (0, INTERRUPTED):
            print_error(failure.read_text(encoding="utf-8") if failure.exists() else fallback)
        return code


def run_rank(config: RunConfig, work: Callable[[RunConfig], None]) -> int:
    """Runs ``work(config)`` as one rank of a world that must have the size that ``config`` says; returns the exit code.

    SIGINT and SIGTERM both raise ``KeyboardInterrupt`` once and are ignored from then on, so that cleaning up is not cut short.
    """
    interrupted = _interrupt_once()
    _end_with_parent()
    try:
        check_world_size(config, int(os.environ["WORLD_SIZE"]))
        refuse_dynamic_rendezvous()
        refuse_pickles()
        work(config)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if interrupted():
            return INTERRUPTED
        _report(error)
        return 1
    return 0


def report_before_leaving(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    """For an ``ExitStack``, pushed last: says what this rank fails of while its peers are still there.

    Once it has let go of them they fail too, of a closed connection, and would be the first to say so.
    """
    del kind, trace
    interrupted = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    if isinstance(error, Exception) and not interrupted:
        _report(error)


def run_until_interrupted(config: RunConfig, work: Callable[[RunConfig], None]) -> int:
    """Runs ``work(config)`` in this process, which SIGINT and SIGTERM end in an orderly way; returns the exit code."""
    _interrupt_once()
    try:
        work(config)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def check_world_size(config: RunConfig, world_size: int) -> None:
    """``ValueError`` unless as many ranks were started as ``engine.parallel`` needs."""
    parallel = config.engine.parallel
    needed = parallel.world_size
    if world_size != needed:
        raise ValueError(
            f"engine.parallel needs tp × pp × dp = {parallel.tp} × {parallel.pp} × {parallel.dp} = {needed} ranks, but "
            f"WORLD_SIZE is {world_size}; start torchrun with --nproc-per-node {needed}, or change engine.parallel"
        )


def print_error(text: str) -> None:
    """One sentence on standard error."""
    sys.stderr.write(f"error: {text}\n")
    sys.stderr.flush()


def _run_agent(arguments: Sequence[str], world_size: int, folder: Path) -> tuple[int, str]:
    """The exit code, and what to say if no rank said anything."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = ["--nnodes=1", f"--nproc-per-node={world_size}", f"--rdzv-id={uuid.uuid4()}", f"--log-dir={folder / 'ranks'}"]
    try:
        run_agent([*options, "--local-addr=127.0.0.1", *arguments])
    except SignalException:
        return INTERRUPTED, ""
    except ChildFailedError as error:
        return _describe_end(error)
    return 0, ""


def _describe_end(error: ChildFailedError) -> tuple[int, str]:
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        return failure.exitcode, f"rank {rank} ended with exit code {failure.exitcode}; what it wrote last is above"
    name = signal.Signals(-failure.exitcode).name
    hint = "; the kernel does this when memory runs out" if name == "SIGKILL" else ""
    return 128 - failure.exitcode, f"rank {rank} was ended by {name}{hint}"


@contextmanager
def _environment(failure: Path) -> Iterator[None]:
    """What the ranks inherit, and an agent that keeps its log lines to itself; as before afterwards."""
    before, level = dict(os.environ), logging.root.manager.disable
    os.environ[_FAILURE_FILE] = str(failure)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not wants_traceback():
        logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(level)
        os.environ.clear()
        os.environ.update(before)


def _show_cursor() -> None:
    """A rank that was killed while it drew a live view could not do it."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()


def _report(error: Exception) -> None:
    """Says what this rank failed of: to ``launch`` if it listens and no rank was first, else to standard error."""
    if getattr(error, _REPORTED, False):
        return
    setattr(error, _REPORTED, True)
    sentence = describe(error) if is_ours(error) else f"rank {os.environ['RANK']}: {describe(error)}"
    first = _claim(sentence)
    if wants_traceback() or (first and not is_ours(error)):
        traceback.print_exception(error)
    if _FAILURE_FILE not in os.environ:
        print_error(sentence)


def _claim(sentence: str) -> bool:
    """Writes the sentence for ``launch``; whether this rank was the first, or nobody listens."""
    if _FAILURE_FILE not in os.environ:
        return True
    try:
        with open(os.environ[_FAILURE_FILE], "x", encoding="utf-8") as file:
            file.write(sentence)
    except FileExistsError:
        return False
    return True


def _interrupt_once() -> Callable[[], bool]:
    """Installs the handlers; the function returned says whether a signal has come."""
    received: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        received.append(number)
        raise KeyboardInterrupt

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, handle)
    return lambda: bool(received)


def _end_with_parent() -> None:
    """On Linux, has the kernel send SIGTERM to this rank if the agent that ``launch`` runs dies without a word."""
    if sys.platform == "linux" and _FAILURE_FILE in os.environ:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
