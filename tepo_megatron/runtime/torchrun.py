"""Starts and ends a machine's ranks together.

``python -m tepo_megatron.runtime.torchrun`` is ``torchrun`` for a cluster's node, with our signals and exit codes.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from tepo_megatron.errors import wants_traceback
from tepo_megatron.runtime.heartbeat import watching
from tepo_megatron.runtime.job_control import stopped_together
from tepo_megatron.runtime.preemption import INTERRUPTED, PREEMPTED, RANKS_FOLDER, StopRequested, not_ignored
from tepo_megatron.runtime.rank import FAILURE_FILE, print_error
from tepo_megatron.runtime.rendezvous import FOLDER_VARIABLE
from tepo_megatron.runtime.supervise import folder_name
from tepo_megatron.runtime.text import open_closed_streams, outlive_readers

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters

_AGENT_LOG = "torch.distributed.elastic.multiprocessing.api"


def run_ranks(
    arguments: Sequence[str], world_size: int, module: str = "tepo_megatron", *, status: Path | None = None
) -> tuple[int, str]:
    """Returns the exit code and the first failed rank's message.

    ``status``: folder of heartbeats. Stop signals go to every rank. If one fails, the others are ended.
    """
    hangs: list[str] = []
    with tempfile.TemporaryDirectory(prefix=f"{folder_name()}-") as folder:
        failure = Path(folder) / "failure.txt"
        try:
            with (
                _environment(failure),
                watching(status, hangs.append),
                stopped_together(_show_cursor),
                _forwarded_signals(Path(folder), world_size) as asked,
            ):
                code, end, killed = _run_ranks(["-m", module, *arguments], world_size, Path(folder), asked)
        except StopRequested as stop:
            code = stop.exit_code
        _show_cursor()
        if code in (0, INTERRUPTED, PREEMPTED):
            return code, ""
        message = failure.read_text(encoding="utf-8") if failure.exists() else ""
        if killed and message:  # a killed rank comes first, since the others' connections to it broke
            message = f"{end}. Then the others failed: {message}"
        return code, hangs[0] if hangs else message or end


def run_node(arguments: Sequence[str]) -> int:
    """Runs one of several nodes; ``--status FOLDER``, of heartbeats, may come first.

    After a stop signal rank 0's node returns 75 or 130. Other failures are raised as by ``torchrun``.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    status = None
    if list(arguments[:1]) == ["--status"]:
        status, arguments = Path(arguments[1]), arguments[2:]
    os.environ.update(_agent_environment())
    parsed = torchrun.parse_args(list(arguments))
    with tempfile.TemporaryDirectory(prefix=f"{folder_name()}-") as folder, watching(status, print_error), stopped_together():
        try:
            with _forwarded_signals(Path(folder), int(parsed.nproc_per_node)) as asked:
                # The agent would log a rank that stopped on request as a failure.
                logging.getLogger(_AGENT_LOG).addFilter(lambda record: asked() is None)
                try:
                    _run_agent(arguments, Path(folder))
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
    return StopRequested(asked).exit_code if asked is not None and code == -asked else None


def _run_ranks(
    arguments: Sequence[str], world_size: int, folder: Path, asked: Callable[[], int | None]
) -> tuple[int, str, bool]:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = ["--nnodes=1", f"--nproc-per-node={world_size}", f"--rdzv-id={uuid.uuid4()}", f"--log-dir={folder / 'ranks'}"]
    try:
        _run_agent([*options, "--local-addr=127.0.0.1", *arguments], folder)
    except ChildFailedError as error:
        code = _stop_code(error, asked())
        return _describe_end(error) if code is None else (code, "", False)
    except SignalException as error:
        name = error.sigval.name
        sentence = f"{name}: the job is ended at once, without saving; go on from its newest checkpoint with --resume"
        return 128 + error.sigval, sentence, False
    return 0, "", False


def _describe_end(error: ChildFailedError) -> tuple[int, str, bool]:
    rank, failure = error.get_first_failure()
    # A killed rank breaks the connections of others, and their ends may be seen first.
    killed = [
        (r, f) for r, f in error.failures.items() if f.exitcode < 0 and -f.exitcode not in (signal.SIGINT, signal.SIGTERM)
    ]
    rank, failure = killed[0] if killed else (rank, failure)
    if failure.exitcode >= 0:
        return failure.exitcode, f"rank {rank} ended with exit code {failure.exitcode}; what it wrote last is above", False
    name = signal.Signals(-failure.exitcode).name
    hint = "; the kernel does this when memory runs out" if name == "SIGKILL" else ""
    return 128 - failure.exitcode, f"rank {rank} was ended by {name}{hint}", bool(killed)


@contextmanager
def _environment(failure: Path) -> Iterator[None]:
    before, level = dict(os.environ), logging.root.manager.disable
    os.environ[FAILURE_FILE] = str(failure)
    os.environ.update(_agent_environment())
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


_BACKEND = "tepo"  # of the rendezvous


@contextmanager
def _forwarded_signals(folder: Path, ranks: int) -> Iterator[Callable[[], int | None]]:
    """The parent passes every stop signal on to each rank; ``folder`` is private.

    Before all ranks handle signals, ``StopRequested`` is raised in the parent. Yields a function that returns the first signal.
    """
    received: list[int] = []

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

    before = {number: signal.signal(number, forward) for number in not_ignored()}
    os.environ[RANKS_FOLDER] = str(folder)
    try:
        yield lambda: received[0] if received else None
    finally:
        del os.environ[RANKS_FOLDER]
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _agent_environment() -> dict[str, str]:
    """Lets torchrun's agent handle no stop signal, after which it kills the ranks in 30 s, and none that is ignored."""
    # The list may not be empty; nobody sends the other one.
    return {"PET_SIGNALS_TO_HANDLE": "SIGQUIT" if not_ignored([signal.SIGQUIT]) else "SIGRTMAX"}


def _run_agent(arguments: Sequence[str], folder: Path) -> None:
    """Raises torchrun's errors, and ValueError for a dynamic rendezvous."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    parsed = torchrun.parse_args(list(arguments))
    least, _, most = parsed.nnodes.partition(":")  # torchrun's default is 1:1
    if parsed.standalone or parsed.rdzv_backend not in ("static", _BACKEND) or (most or least) != least:
        raise ValueError(
            "ranks meet by a static rendezvous: leave out --standalone and --rdzv-backend, and give --nnodes as one number"
        )
    parsed.nnodes = least
    configured = parsed.rdzv_conf.split(",") if parsed.rdzv_conf else []
    parsed.rdzv_conf = ",".join([*configured, f"rank={parsed.node_rank}"])
    parsed.rdzv_endpoint = parsed.rdzv_endpoint or f"{parsed.master_addr}:{parsed.master_port or 29500}"
    parsed.rdzv_backend, parsed.node_rank = _BACKEND, 0  # the agent has the node's number from rdzv_conf
    rendezvous_handler_registry.register(_BACKEND, _make_handler)
    if int(parsed.nnodes) > 1:
        torchrun.run(parsed)
        return
    os.environ[FOLDER_VARIABLE] = str(folder)
    try:
        torchrun.run(parsed)
    finally:
        del os.environ[FOLDER_VARIABLE]


def _make_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    class OnOurStore(StaticTCPRendezvous):
        def get_backend(self) -> str:
            return _BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            if self._store is None:  # the agent of one machine speaks with nobody
                self._store = HashStore() if nodes == 1 else _meet(host, port, node, nodes, self.timeout)
            return super().next_rendezvous()

    nodes, node = parameters.max_nodes, int(parameters.config["rank"])
    host, port = parse_rendezvous_endpoint(parameters.endpoint, -1) if nodes > 1 else ("127.0.0.1", 0)
    return OnOurStore(host, port, node, nodes, parameters.run_id, int(parameters.config.get("timeout", 900)))


def _meet(host: str, port: int, node: int, nodes: int, limit: timedelta) -> Store:
    """The first node listens on ``host`` only, torch's own store on every interface."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if node > 0:
        return TCPStore(host, port, nodes, False, limit)
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise RuntimeError(
            f"the first node cannot listen on {host}:{port} for the others ({error.strerror or error}); --master-addr must be "
            "an address of the first node, and --master-port free there"
        ) from error
    return TCPStore(host, port, nodes, True, limit, master_listen_fd=listener.detach())


if __name__ == "__main__":
    open_closed_streams()
    outlive_readers()
    sys.exit(run_node(sys.argv[1:]))
