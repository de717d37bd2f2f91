"""Starts and ends the ranks of one machine together.

``python -m tepo_megatron.runtime.torchrun`` is ``torchrun`` for a node of a cluster, with our signals and exit codes.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tepo_megatron.errors import wants_traceback
from tepo_megatron.runtime.heartbeat import watching
from tepo_megatron.runtime.job_control import stopped_together
from tepo_megatron.runtime.preemption import (
    INTERRUPTED,
    PREEMPTED,
    StopRequested,
    agent_environment,
    exit_code,
    forward_signals,
)
from tepo_megatron.runtime.rank import FAILURE_FILE, print_error
from tepo_megatron.runtime.rendezvous import run_agent
from tepo_megatron.runtime.streams import open_closed_streams, outlive_readers
from tepo_megatron.runtime.supervise import folder_name

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_AGENT_LOG = "torch.distributed.elastic.multiprocessing.api"


def run_ranks(
    arguments: Sequence[str], world_size: int, module: str = "tepo_megatron", *, status: Path | None = None
) -> tuple[int, str]:
    """Returns the exit code and the first failed rank's message.

    ``status``: folder of heartbeats. Stop signals go to every rank. If a rank fails, the others are ended.
    """
    hangs: list[str] = []
    with tempfile.TemporaryDirectory(prefix=f"{folder_name()}-") as folder:
        failure = Path(folder) / "failure.txt"
        try:
            with (
                _environment(failure),
                watching(status, hangs.append),
                stopped_together(_show_cursor),
                forward_signals(Path(folder), world_size) as asked,
            ):
                code, end = _run_agent(["-m", module, *arguments], world_size, Path(folder), asked)
        except StopRequested as stop:
            code = stop.exit_code
        _show_cursor()
        if code in (0, INTERRUPTED, PREEMPTED):
            return code, ""
        return code, _first_cause(hangs, end, failure.read_text(encoding="utf-8") if failure.exists() else "")


@dataclass(frozen=True)
class _End:
    sentence: str = ""
    killed: bool = False


def _first_cause(hangs: Sequence[str], end: _End, said: str) -> str:
    """A killed rank comes first, since the others' connections to it broke."""
    if hangs:
        return hangs[0]
    if end.killed and said:
        return f"{end.sentence}. Then the others failed: {said}"
    return said or end.sentence


def run_node(arguments: Sequence[str]) -> int:
    """One node of several: ``--status FOLDER``, the folder of heartbeats, may come first.

    After a stop signal the node of rank 0 returns 75 or 130. Other failures are raised as ``torchrun`` does.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    status = None
    if list(arguments[:1]) == ["--status"]:
        status, arguments = Path(arguments[1]), arguments[2:]
    os.environ.update(agent_environment())
    parsed = torchrun.parse_args(list(arguments))
    with tempfile.TemporaryDirectory(prefix=f"{folder_name()}-") as folder, watching(status, print_error), stopped_together():
        try:
            with forward_signals(Path(folder), int(parsed.nproc_per_node)) as asked:
                # The agent would log a rank that stopped on request as a failure.
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
    code = error.get_first_failure()[1].exitcode
    if code in (INTERRUPTED, PREEMPTED):
        return code
    return exit_code(asked) if asked is not None and code == -asked else None


def _run_agent(arguments: Sequence[str], world_size: int, folder: Path, asked: Callable[[], int | None]) -> tuple[int, _End]:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = ["--nnodes=1", f"--nproc-per-node={world_size}", f"--rdzv-id={uuid.uuid4()}", f"--log-dir={folder / 'ranks'}"]
    try:
        run_agent([*options, "--local-addr=127.0.0.1", *arguments], folder)
    except ChildFailedError as error:
        code = _stop_code(error, asked())
        return _describe_end(error) if code is None else (code, _End())
    except SignalException as error:
        name = error.sigval.name
        sentence = f"{name}: the job is ended at once, without saving; go on from its newest checkpoint with --resume"
        return 128 + error.sigval, _End(sentence)
    return 0, _End()


def _describe_end(error: ChildFailedError) -> tuple[int, _End]:
    rank, failure = error.get_first_failure()
    # A killed rank breaks the connections of others, and their ends may be seen first.
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
    before, level = dict(os.environ), logging.root.manager.disable
    os.environ[FAILURE_FILE] = str(failure)
    os.environ.update(agent_environment())
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
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()


if __name__ == "__main__":
    open_closed_streams()
    outlive_readers()
    sys.exit(run_node(sys.argv[1:]))
