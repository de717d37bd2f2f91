"""The ranks of a run on one machine: started and ended together, with one sentence about what went wrong.

``launch`` is the parent's side: it runs the agent that the ``torchrun`` command runs. ``run_rank`` is what each rank does,
started by ``launch`` or by ``torchrun`` by hand. ``python -m tepo_megatron.torchrun`` is the ``torchrun`` command for a node of
a cluster, with this package's signals and exit codes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tepo_megatron.errors import describe, is_ours, wants_traceback
from tepo_megatron.preemption import (
    AGENT_ENVIRONMENT,
    INTERRUPTED,
    PREEMPTED,
    STOP_SIGNALS,
    StopRequested,
    exit_code,
    forward_signals,
    install_stop_signals,
    stop_signals,
)
from tepo_megatron.rendezvous import refuse_dynamic_rendezvous, refuse_pickles, run_agent
from tepo_megatron.watch.watcher import watching

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from tepo_megatron.config import RunConfig

_LEAVE_S = 2.0
"""How long a rank that was asked to stop waits at the end for its threads, which may wait for servers that go on without it."""

_AGENT_LOG = "torch.distributed.elastic.multiprocessing.api"

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


def is_restart() -> bool:
    """Whether torchrun has started this rank again, after a failure (its ``--max-restarts``)."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def launch(arguments: Sequence[str], world_size: int, module: str = "tepo_megatron", *, status: Path | None = None) -> int:
    """Runs ``python -m <module>`` with ``arguments`` as ``world_size`` ranks of this machine; returns the exit code.

    Where the ranks' heartbeats are in ``status``, ranks that hang are found there and ended, with a report (``watch/``).

    A signal (Ctrl-C, SIGTERM, SIGUSR1) goes to every rank, and this returns when they have ended. If a rank fails, the others
    are ended, and the first one's sentence is printed last. The ranks meet in a private file and talk over the loopback
    interface.
    """
    hangs: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tepo-") as folder:
        failure = Path(folder) / "failure.txt"
        try:
            with (
                _environment(failure),
                watching(status, hangs.append),
                forward_signals(Path(folder), world_size) as asked,
            ):
                code, end = _run_agent(["-m", module, *arguments], world_size, Path(folder), asked)
        except StopRequested as stop:
            code = stop.exit_code
        _show_cursor()
        if code not in (0, INTERRUPTED, PREEMPTED):
            print_error(_first_cause(hangs, end, failure.read_text(encoding="utf-8") if failure.exists() else ""))
        return code


@dataclass(frozen=True)
class _End:
    """How the first rank ended: ``sentence``; ``killed``: by a signal, of which it could say nothing itself."""

    sentence: str = ""
    killed: bool = False


def _first_cause(hangs: Sequence[str], end: _End, said: str) -> str:
    """What is told. A rank that was killed comes before what the others ``said``, since their connections to it broke."""
    if hangs:
        return hangs[0]
    if end.killed and said:
        return f"{end.sentence}. Then the others failed: {said}"
    return said or end.sentence


def run_rank(config: RunConfig, work: Callable[[RunConfig], None]) -> int:
    """Runs ``work(config)`` as one rank of a world that must have the size that ``config`` says; returns the exit code.

    SIGINT, SIGTERM and SIGUSR1 raise ``StopRequested`` as ``StopSignals`` says. After one rank 0 ends with 130 or 75, the
    others with 0: the agent would end rank 0 with the first that says something else.
    """
    signals = install_stop_signals(grace_s=config.train.grace_s, warning_s=config.train.warning_s)
    _end_with_parent()
    try:
        check_world_size(config, int(os.environ["WORLD_SIZE"]))
        refuse_dynamic_rendezvous()
        refuse_pickles()
        work(config)
    except StopRequested as stop:
        return _leave(stop.exit_code if os.environ["RANK"] == "0" else 0)
    except Exception as error:
        if signals.requested is not None and not signals.at_risk():
            return _leave(exit_code(signals.requested))  # what failed was on its way out
        _report(error)
        return 1
    return 0


def report_before_leaving(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    """For an ``ExitStack``, pushed last: says what this rank fails of while its peers are still there.

    Once it has let go of them they fail too, of a closed connection, and would be the first to say so.
    """
    del kind, trace
    signals = stop_signals()
    if isinstance(error, Exception) and (signals.requested is None or signals.at_risk()):
        _report(error)


def run_until_interrupted(config: RunConfig, work: Callable[[RunConfig], None]) -> int:
    """Runs ``work(config)`` in this process, which Ctrl-C and SIGTERM end in an orderly way; returns the exit code."""
    install_stop_signals(numbers=(signal.SIGINT, signal.SIGTERM))
    try:
        work(config)
    except StopRequested:
        return INTERRUPTED
    return 0


def check_world_size(config: RunConfig, world_size: int) -> None:
    """``ValueError`` unless as many ranks were started as ``engine.parallel`` needs."""
    parallel = config.engine.parallel
    needed = parallel.world_size
    if world_size != needed:
        raise ValueError(
            f"engine.parallel needs tp × pp × cp × dp = {parallel.tp} × {parallel.pp} × {parallel.cp} × {parallel.dp} = "
            f"{needed} ranks, but WORLD_SIZE is {world_size}; start torchrun with --nproc-per-node {needed}, or change "
            "engine.parallel"
        )


def print_error(text: str) -> None:
    """One sentence on standard error."""
    sys.stderr.write(f"error: {text}\n")
    sys.stderr.flush()


def run_node(arguments: Sequence[str]) -> int:
    """The ``torchrun`` command with these arguments, for the ranks of one node of several; returns the exit code.

    ``--status FOLDER`` may come first: where the ranks' heartbeats are, so that ranks that hang are found. A signal goes to
    every rank of the node, and this returns when they have ended, with 75 or 130 on the node of rank 0. Other failures are
    raised as ``torchrun`` does, with its table of ranks.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    status = None
    if list(arguments[:1]) == ["--status"]:
        status, arguments = Path(arguments[1]), arguments[2:]
    os.environ.update(AGENT_ENVIRONMENT)
    parsed = torchrun.parse_args(list(arguments))
    with tempfile.TemporaryDirectory(prefix="tepo-") as folder, watching(status, print_error):
        try:
            with forward_signals(Path(folder), int(parsed.nproc_per_node)) as asked:
                # The agent would log a rank that did as it was asked as a failure.
                logging.getLogger(_AGENT_LOG).addFilter(lambda record: asked() is None)
                try:
                    run_agent(arguments, Path(folder))
                except ChildFailedError as error:
                    if (code := _stop_code(error, asked())) is None:
                        raise
                    return code
        except StopRequested as stop:
            return stop.exit_code
    return 0


def _stop_code(error: ChildFailedError, asked: int | None) -> int | None:
    """The exit code of ranks that were asked to stop and did; None for any other failure."""
    code = error.get_first_failure()[1].exitcode
    if code in (INTERRUPTED, PREEMPTED):
        return code
    return exit_code(asked) if asked is not None and code == -asked else None


def _run_agent(arguments: Sequence[str], world_size: int, folder: Path, asked: Callable[[], int | None]) -> tuple[int, _End]:
    """The exit code, and how the first rank ended."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = ["--nnodes=1", f"--nproc-per-node={world_size}", f"--rdzv-id={uuid.uuid4()}", f"--log-dir={folder / 'ranks'}"]
    try:
        run_agent([*options, "--local-addr=127.0.0.1", *arguments], folder)
    except ChildFailedError as error:
        code = _stop_code(error, asked())
        return _describe_end(error) if code is None else (code, _End())
    return 0, _End()


def _describe_end(error: ChildFailedError) -> tuple[int, _End]:
    rank, failure = error.get_first_failure()
    # A rank that a signal ended takes others with it, which may have been seen to end before it.
    killed = [
        (r, f) for r, f in error.failures.items() if f.exitcode < 0 and -f.exitcode not in (signal.SIGINT, signal.SIGTERM)
    ]
    rank, failure = killed[0] if killed else (rank, failure)
    if failure.exitcode >= 0:
        return failure.exitcode, _End(f"rank {rank} ended with exit code {failure.exitcode}; what it wrote last is above")
    name = signal.Signals(-failure.exitcode).name
    hint = "; the kernel does this when memory runs out" if name == "SIGKILL" else ""
    return 128 - failure.exitcode, _End(f"rank {rank} was ended by {name}{hint}", killed=bool(killed))


@contextmanager
def _environment(failure: Path) -> Iterator[None]:
    """What the ranks inherit, and an agent that keeps its log lines to itself; as before afterwards."""
    before, level = dict(os.environ), logging.root.manager.disable
    os.environ[_FAILURE_FILE] = str(failure)
    os.environ.update(AGENT_ENVIRONMENT)
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


def _leave(code: int) -> int:
    """Returns the exit code once no thread keeps the interpreter, or ends the process with it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # one more would end an interpreter that is closing with another code
    end = time.monotonic() + _LEAVE_S
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
    return code


def _end_with_parent() -> None:
    """On Linux, has the kernel send SIGTERM to this rank if the agent that ``launch`` runs dies without a word."""
    if sys.platform == "linux" and _FAILURE_FILE in os.environ:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run_node(sys.argv[1:]))
