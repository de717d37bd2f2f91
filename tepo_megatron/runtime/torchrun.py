"""Starts and ends a machine's ranks together.

``python -m tepo_megatron.runtime.torchrun`` is ``torchrun`` for a cluster's node, with our signals and exit codes.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tepo_megatron.errors import wants_traceback
from tepo_megatron.runtime.heartbeat import watching
from tepo_megatron.runtime.job_control import stopped_together
from tepo_megatron.runtime.machine import changed_environment
from tepo_megatron.runtime.preemption import INTERRUPTED, PREEMPTED, RANKS_FOLDER, StopRequested, handled_by, not_ignored
from tepo_megatron.runtime.rank import FAILURE_FILE, HAS_PARENT, STARTER, FailureReport, print_error
from tepo_megatron.runtime.rendezvous import FOLDER_VARIABLE
from tepo_megatron.runtime.restarts import NodeMeeting, NodesApartError, RanksEnd, attempt, job_name, run_attempts
from tepo_megatron.runtime.supervise import locked_folder
from tepo_megatron.runtime.text import open_closed_streams, outlive_readers

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters

_AGENT_LOG = "torch.distributed.elastic.multiprocessing.api"
_FROM_CHECKPOINT = "go on from its newest checkpoint with --resume"
_ENDED = f". The job is ended; {_FROM_CHECKPOINT}"


def run_ranks(
    arguments: Sequence[str],
    world_size: int,
    module: str = "tepo_megatron",
    *,
    status: Path | None = None,
    max_restarts: int = 0,
    stops: list[int] | None = None,
) -> tuple[int, str]:
    """Returns the exit code and the first failed rank's message.

    ``status``: folder of heartbeats. Stop signals go to every rank, and into ``stops``. If one rank fails, the others are
    ended; if one was lost, all start again, at most ``max_restarts`` times.
    """
    command = ["-m", module, *arguments]
    received = [] if stops is None else stops
    end = run_attempts(lambda: _run_attempt(command, world_size, status, received), max_restarts, partial(_saved, status))
    return end.code, end.message + end.advice


def _saved(status: Path | None) -> list[str]:
    with suppress(OSError):  # the disk may be what lost the ranks
        folders = [] if status is None else status.parent.glob("checkpoints/step_*")
        return sorted(folder.name for folder in folders if not folder.suffix)
    return []


def _run_attempt(command: Sequence[str], world_size: int, status: Path | None, received: list[int]) -> RanksEnd:
    hangs: list[str] = []
    was_asked = False
    with locked_folder() as folder:
        failure = folder / "failure.json"
        try:
            with (
                _environment(failure),
                watching(status, hangs.append),
                stopped_together(_show_cursor),
                _forwarded_signals(folder, world_size, received) as asked,
            ):
                end = _run_ranks(command, world_size, folder, asked)
                was_asked = asked() is not None
        except StopRequested as stop:
            end = RanksEnd(stop.exit_code)
        _show_cursor()
        end = _explained(end, hangs, failure)
        return end._replace(lost=end.lost and not was_asked)  # what happens while a run saves does not start it again


def _explained(end: RanksEnd, hangs: Sequence[str], failure: Path) -> RanksEnd:
    if end.code in (0, INTERRUPTED, PREEMPTED):
        return RanksEnd(end.code)
    if hangs:
        return end._replace(message=hangs[0], lost=True, advice=_ENDED)
    report = FailureReport.read(failure)
    if report is None:
        return end
    if end.lost:  # a killed rank comes first, since the others' connections to it broke
        return end._replace(message=f"{end.message}. Then the others failed: {report.sentence}")
    return RanksEnd(end.code, report.sentence, lost=not report.is_ours)


def run_node(arguments: Sequence[str]) -> int:
    """Runs one of several nodes; ``--status FOLDER``, of heartbeats, and ``--spares N`` may come first. With torchrun's
    ``--max-restarts`` the ranks of all nodes are started again if one is lost, and N nodes more than --nnodes may take part.

    After a stop signal rank 0's node returns 75 or 130. Other failures are raised as by ``torchrun``.
    """
    from torch.distributed import run as torchrun

    options = {"--status": "", "--spares": "0"}
    while arguments and arguments[0] in options:
        options[arguments[0]], arguments = arguments[1], arguments[2:]
    os.environ.update(_agent_environment())
    parsed = torchrun.parse_args(list(arguments))
    status, spares = Path(options["--status"]) if options["--status"] else None, int(options["--spares"])
    failures: list[ChildFailedError] = []

    def run_once(place: int | None, received: list[int]) -> RanksEnd:
        return _run_node_attempt(arguments, int(parsed.nproc_per_node), status, failures, place, received)

    def run_alone() -> RanksEnd:
        return run_once(None, [])

    try:
        if not parsed.max_restarts:
            end = run_alone()
        elif parsed.nnodes in ("1", "1:1") and not spares:
            end = run_attempts(run_alone, parsed.max_restarts, partial(_saved, status))
        else:
            end = _run_with_other_nodes(parsed, spares, run_once, partial(_saved, status))
    except NodesApartError as error:
        print_error(str(error))
        return 1
    except StopRequested as stop:
        return stop.exit_code
    if end.code in (0, INTERRUPTED, PREEMPTED):
        return end.code
    raise failures[-1]


def _run_with_other_nodes(
    parsed: Any, spares: int, run_once: Callable[[int, list[int]], RanksEnd], saved: Callable[[], list[str]]
) -> RanksEnd:
    global _store
    node, limit = int(parsed.node_rank), timedelta(seconds=_MEET_S)
    stopped: list[int] = []

    def run(place: int) -> RanksEnd:
        if stopped:
            return RanksEnd(StopRequested(stopped[0]).exit_code if place == 0 else 0)
        return run_once(place, stopped)

    place = (parsed.master_addr, int(parsed.master_port or _PORT))
    # Within an attempt the ranks get the signals; a spare has none.
    with handled_by(lambda number, _frame: stopped.append(number), not_ignored()):
        with handled_by(_stop, not_ignored()):
            store, watching = (_meet(*place, node + number, limit) for number in (0, 1))
        _store = store
        try:
            nodes = int(parsed.nnodes)
            meeting = NodeMeeting(store, watching, node, nodes, spares, parsed.max_restarts, _MEET_S, stopped, saved)
            return meeting.run(run)
        finally:
            _store = None


def _stop(number: int, _frame: FrameType | None) -> None:
    raise StopRequested(number)


def _run_node_attempt(
    arguments: Sequence[str],
    ranks: int,
    status: Path | None,
    failures: list[ChildFailedError],
    place: int | None,
    received: list[int],
) -> RanksEnd:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    hangs: list[str] = []

    def note_hang(sentence: str) -> None:
        hangs.append(sentence)
        print_error(sentence if job_name() else f"{sentence}{_ENDED}")

    with locked_folder() as folder, watching(status, note_hang), stopped_together():
        failure = folder / "failure.json"
        try:
            with changed_environment(**{FAILURE_FILE: str(failure)}), _forwarded_signals(folder, ranks, received) as asked:
                # The agent would log a rank that stopped on request as a failure.
                logging.getLogger(_AGENT_LOG).addFilter(lambda record: asked() is None)
                try:
                    _run_agent(arguments, folder, place)
                except ChildFailedError as error:
                    failures.append(error)
                    code = _stop_code(error, asked())
                    end = RanksEnd(code) if code is not None else _explained(_describe_end(error), hangs, failure)
                    return end._replace(lost=end.lost and asked() is None)
        except StopRequested as stop:
            return RanksEnd(stop.exit_code)
    return RanksEnd(0)


def _stop_code(error: ChildFailedError, asked: int | None) -> int | None:
    code = error.get_first_failure()[1].exitcode
    if code in (INTERRUPTED, PREEMPTED):
        return code
    return StopRequested(asked).exit_code if asked is not None and code == -asked else None


def _run_ranks(arguments: Sequence[str], world_size: int, folder: Path, asked: Callable[[], int | None]) -> RanksEnd:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = ["--nnodes=1", f"--nproc-per-node={world_size}", f"--rdzv-id={uuid.uuid4()}", f"--log-dir={folder / 'ranks'}"]
    try:
        _run_agent([*options, "--local-addr=127.0.0.1", *arguments], folder)
    except ChildFailedError as error:
        code = _stop_code(error, asked())
        return _describe_end(error) if code is None else RanksEnd(code)
    except SignalException as error:
        name = error.sigval.name
        return RanksEnd(128 + error.sigval, f"{name}: the job is ended at once, without saving; {_FROM_CHECKPOINT}")
    return RanksEnd(0)


def _describe_end(error: ChildFailedError) -> RanksEnd:
    rank, failure = error.get_first_failure()
    # A killed rank breaks the connections of others, and their ends may be seen first.
    killed = [
        (r, f) for r, f in error.failures.items() if f.exitcode < 0 and -f.exitcode not in (signal.SIGINT, signal.SIGTERM)
    ]
    rank, failure = killed[0] if killed else (rank, failure)
    if failure.exitcode >= 0:
        return RanksEnd(failure.exitcode, f"rank {rank} ended with exit code {failure.exitcode}; what it wrote last is above")
    name = signal.Signals(-failure.exitcode).name
    hint = "; the kernel does this when memory runs out" if name == "SIGKILL" else ""
    pids = tuple(failure.pid for _, failure in killed)
    return RanksEnd(128 - failure.exitcode, f"rank {rank} was ended by {name}{hint}", lost=bool(killed), killed=pids)


@contextmanager
def _environment(failure: Path) -> Iterator[None]:
    level = logging.root.manager.disable
    with changed_environment(**{FAILURE_FILE: str(failure), HAS_PARENT: "1"}, **_agent_environment()):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # ranks and servers share cores: who waits must not spin on one
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if not wants_traceback():
            logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(level)


def _show_cursor() -> None:
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()


_BACKEND = "tepo"  # of the rendezvous
_PORT = 29500
_MEET_S = 900
_TRY_S = 5.0
_CAME = "came"  # counts nodes


@contextmanager
def _forwarded_signals(folder: Path, ranks: int, received: list[int]) -> Iterator[Callable[[], int | None]]:
    """The parent passes every stop signal on to each rank; ``folder`` is private.

    Before all ranks handle signals, ``StopRequested`` is raised in the parent. Yields a function that returns the first signal.
    """

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        files = list(folder.glob("rank-*.pid"))
        if len(files) < ranks:
            if len(received) > 1 and number != signal.SIGINT:
                return  # a closed terminal sends SIGHUP twice: the second one must not cut the clean-up short
            raise StopRequested(number)
        for file in files:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(int(file.read_text()), number)

    with handled_by(forward, not_ignored()), changed_environment(**{RANKS_FOLDER: str(folder)}):
        if received:  # before the signals came here
            raise StopRequested(received[0])
        yield lambda: received[0] if received else None


def _agent_environment() -> dict[str, str]:
    """Lets torchrun's agent handle no stop signal, after which it kills the ranks in 30 s, and none that is ignored."""
    # The list may not be empty; nobody sends the other one.
    return {"PET_SIGNALS_TO_HANDLE": "SIGQUIT" if not_ignored([signal.SIGQUIT]) else "SIGRTMAX", STARTER: str(os.getpid())}


def _run_agent(arguments: Sequence[str], folder: Path, place: int | None = None) -> None:
    """``place``: this node's number in the attempt, if not that of its command line. Raises torchrun's errors, and ValueError
    for a dynamic rendezvous.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    parsed = torchrun.parse_args(list(arguments))
    least, _, most = parsed.nnodes.partition(":")  # torchrun's default is 1:1
    if parsed.standalone or parsed.rdzv_backend not in ("static", _BACKEND) or (most or least) != least:
        raise ValueError(
            "ranks meet by a static rendezvous: leave out --standalone and --rdzv-backend, and give --nnodes as one number"
        )
    parsed.nnodes, parsed.max_restarts = least, 0  # restarts.py starts the ranks again
    if number := attempt():
        parsed.rdzv_id = f"{parsed.rdzv_id}.{number}"
    configured = parsed.rdzv_conf.split(",") if parsed.rdzv_conf else []
    rank = parsed.node_rank if place is None else place
    parsed.rdzv_conf = ",".join([f"timeout={int(_MEET_S)}", *configured, f"rank={rank}"])  # or torch sets its own limit
    parsed.rdzv_endpoint = parsed.rdzv_endpoint or f"{parsed.master_addr}:{parsed.master_port or _PORT}"
    parsed.rdzv_backend, parsed.node_rank = _BACKEND, 0  # the agent has the node's number from rdzv_conf
    rendezvous_handler_registry.register(_BACKEND, _make_handler)
    with changed_environment(**{} if int(parsed.nnodes) > 1 else {FOLDER_VARIABLE: str(folder)}):
        torchrun.run(parsed)


def _make_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    class OnOurStore(StaticTCPRendezvous):
        def get_backend(self) -> str:
            return _BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            if self._store is None:  # the agent of one machine speaks with nobody
                alone = HashStore() if nodes == 1 else _store
                self._store = alone or _meet(host, port, node, self.timeout, nodes)
            return super().next_rendezvous()

    nodes, node = parameters.max_nodes, int(parameters.config["rank"])
    host, port = parse_rendezvous_endpoint(parameters.endpoint, -1) if nodes > 1 else ("127.0.0.1", 0)
    return OnOurStore(host, port, node, nodes, parameters.run_id, int(parameters.config["timeout"]))


_store: Store | None = None
"""Is set if ranks may be started again."""


def _meet(host: str, port: int, node: int, limit: timedelta, nodes: int | None = None) -> Store:
    """The first node listens on ``host`` only, torch's own store on every interface. Waits for ``nodes``, if given.

    Raises NodesApartError, and what a signal's handler raises.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    deadline = time.monotonic() + limit.total_seconds()
    listener = _listen(host, port) if node == 0 else None
    try:
        while node and not _answers(host, port):
            _pause(deadline)
        store = TCPStore(host, port, None, node == 0, limit, False, master_listen_fd=listener)
        store.add(_CAME, 0 if nodes is None else 1)
        while node == 0 and store.add(_CAME, 0) < (nodes or 0):
            _pause(deadline)
        return store
    except (RuntimeError, TimeoutError) as error:
        what = "the first node did not answer" if node else f"not all of {nodes} nodes came"
        whose = "its log" if node else "the logs of the others"
        raise NodesApartError(
            f"{what} at {host}:{port} within {limit.total_seconds():g} s; see {whose}, and whether TCP between nodes is open "
            "(docs/guides/cluster.md)"
        ) from error


def _answers(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=_TRY_S):
        return True
    return False


def _pause(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise TimeoutError
    time.sleep(0.1)


def _listen(host: str, port: int) -> int:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).detach()
    except OSError as error:
        raise NodesApartError(
            f"the first node cannot listen on {host}:{port} for the others ({error.strerror or error}); --master-addr must be "
            "an address of the first node, and --master-port free there"
        ) from error


if __name__ == "__main__":
    open_closed_streams()
    outlive_readers()
    sys.exit(run_node(sys.argv[1:]))
