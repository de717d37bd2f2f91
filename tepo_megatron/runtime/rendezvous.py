"""Where the ranks of a run meet: nothing that a stranger could write is unpickled, and on one machine no port is open for it.

torchrun's dynamic rendezvous (``--standalone``, ``--rdzv-backend c10d``, and its default on one machine) keeps its state as a
pickle in a store that every process that reaches the port may write. The agent unpickles it, so that any user of the machine
runs code as the run's user. Here the ranks of one machine meet in a file of a private folder, and the agents of several nodes
meet in a store that listens on one address of the first node and holds JSON (docs/decisions/015-rendezvous.md).

``python -m tepo_megatron.runtime.torchrun`` takes torchrun's flags and runs torchrun's agent with this rendezvous.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tepo_megatron.runtime.leftovers import folder_name

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

BACKEND = "tepo"
"""The name of this rendezvous among those of torchrun's agent."""

FOLDER_VARIABLE = "TEPO_RENDEZVOUS"
"""Environment of the ranks of one machine: the private folder in which they meet."""

CONNECT_TIMEOUT = timedelta(seconds=60)

LONGEST_FOLDER = 66
"""Bytes of a folder's path in which the name of a socket, at most 107 bytes, still has room."""


def run_agent(arguments: Sequence[str], folder: Path | None = None) -> None:
    """Runs torchrun's agent with its flags ``arguments`` and this rendezvous; returns when the ranks have ended well.

    Ranks of one machine meet in ``folder``, of mode 0700; by default in a temporary one. Raises what torchrun raises, and
    ValueError for flags that ask for a dynamic rendezvous.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    parsed = torchrun.parse_args(list(arguments))
    least, _, most = parsed.nnodes.partition(":")  # torchrun's default is 1:1
    if parsed.standalone or parsed.rdzv_backend not in ("static", BACKEND) or (most or least) != least:
        raise ValueError(
            "ranks meet by a static rendezvous: leave out --standalone and --rdzv-backend, and give --nnodes as one number"
        )
    parsed.nnodes = least
    configured = parsed.rdzv_conf.split(",") if parsed.rdzv_conf else []
    parsed.rdzv_conf = ",".join([*configured, f"rank={parsed.node_rank}"])
    parsed.rdzv_endpoint = parsed.rdzv_endpoint or f"{parsed.master_addr}:{parsed.master_port or 29500}"
    parsed.rdzv_backend, parsed.node_rank = BACKEND, 0  # the agent has the node's number from rdzv_conf
    rendezvous_handler_registry.register(BACKEND, _make_handler)
    if int(parsed.nnodes) > 1:
        torchrun.run(parsed)
        return
    with nullcontext(folder) if folder else tempfile.TemporaryDirectory(prefix=f"{folder_name()}-") as place:  # mode 0700
        os.environ[FOLDER_VARIABLE] = str(place)
        try:
            torchrun.run(parsed)
        finally:
            del os.environ[FOLDER_VARIABLE]


def rank_store(world_size: int, timeout: timedelta) -> Store | None:
    """The store of the ranks of one machine; None where torch finds it by ``MASTER_ADDR`` (several nodes, torchrun by hand).

    Every rank calls. Raises RuntimeError if others than its owner may enter the folder.
    """
    from torch.distributed import FileStore  # type: ignore[attr-defined] # torch exports it without saying so

    if FOLDER_VARIABLE not in os.environ:
        return None
    folder = Path(os.environ[FOLDER_VARIABLE])
    found = folder.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise RuntimeError(
            f"the ranks should meet in {folder} ({FOLDER_VARIABLE}), but other users may enter it; set it to 0700"
        )
    if os.environ["RANK"] == "0":  # who leaves last: in a store whose file is gone it would wait for minutes
        _at_end(functools.partial(_remove_if_orphaned, folder, os.getppid()))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store: Store = FileStore(str(folder / f"attempt-{attempt}"), world_size)
    store.set_timeout(timeout)
    return store


_removals: list[Callable[[], None]] = []


def _at_end(remove: Callable[[], None]) -> None:
    if not _removals:
        atexit.register(remove_folders)
    _removals.append(remove)


def remove_folders() -> None:
    """Removes the folders of this process, as its end does: for one that ends without the interpreter's own end."""
    while _removals:
        _removals.pop()()


def _remove_if_orphaned(folder: Path, agent: int) -> None:
    """The agent removes the folder, unless it was killed. Where rank 0 was killed too, the next server's start does."""
    if os.getppid() != agent:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def private_folder() -> Path:
    """A folder of this process that its user alone may enter, removed when it ends.

    In a rank of one machine it lies in the ranks' own, which the agent removes when they are gone, however they ended; where
    that path is too long for the names of sockets, in /tmp.
    """
    ranks = os.environ.get(FOLDER_VARIABLE)
    parent, name = (ranks, "tepo-") if ranks else (tempfile.gettempdir(), f"{folder_name()}-")
    if len(os.fsencode(f"{parent}/{name}12345678")) > LONGEST_FOLDER:
        parent, name = "/tmp", f"{folder_name()}-"  # noqa: S108
    folder = tempfile.mkdtemp(prefix=name, dir=parent)  # mode 0700
    _at_end(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    return Path(folder)


def refuse_dynamic_rendezvous() -> None:
    """ValueError if this rank was started by torchrun with a rendezvous that is not static; see the module's first lines.

    Of a static rendezvous the agent's own keys are in the store that ``MASTER_ADDR`` and ``MASTER_PORT`` name.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None or FOLDER_VARIABLE in os.environ or os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1":
        return
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, None, False, CONNECT_TIMEOUT, False)
    if not store.check([f"{run_id}/torchelastic/role_info/0"]):
        raise ValueError(
            "torchrun keeps the state of its dynamic rendezvous (--standalone, --rdzv-backend=c10d, or no --master-port on one "
            "machine) as a pickle that other users of this machine can replace by code of theirs; start the run with "
            "'tepo train', or write 'python -m tepo_megatron.runtime.torchrun' in place of 'torchrun'"
        )


def refuse_pickles() -> None:
    """From here on torch's collectives of Python objects raise RuntimeError in this process where they would unpickle.

    The connections between ranks are not encrypted and ask for no key: what arrives by them must not be able to run code.
    """
    from torch.distributed import distributed_c10d

    distributed_c10d._unpickler = _refuse_to_unpickle  # type: ignore[assignment]


def _refuse_to_unpickle(_bytes: object) -> NoReturn:
    raise RuntimeError(
        "a collective of Python objects (all_gather_object, broadcast_object_list, …) would unpickle what another process "
        "sent; send tensors or JSON (tepo_megatron.trainer.megatron.platform.collectives)"
    )


def _make_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """What torchrun's agent asks for the other agents, and for the address that it tells its ranks."""
    from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    nodes, node = parameters.max_nodes, int(parameters.config["rank"])
    host, port = parse_rendezvous_endpoint(parameters.endpoint, -1) if nodes > 1 else ("127.0.0.1", 0)
    limit = timedelta(seconds=float(parameters.config.get("timeout", 900)))

    class Handler(RendezvousHandler):
        store: Store | None = None

        @property
        def use_agent_store(self) -> bool:
            return True

        def get_backend(self) -> str:
            return BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            if self.store is None:  # the agent of one machine speaks with nobody
                self.store = HashStore() if nodes == 1 else _meet(host, port, node, nodes, limit)
            place = RendezvousStoreInfo(host, port)
            return RendezvousInfo(PrefixStore(parameters.run_id, self.store), node, nodes, place)

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            return None

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return parameters.run_id

        def shutdown(self) -> bool:
            return True

    return Handler()


def _meet(host: str, port: int, node: int, nodes: int, limit: timedelta) -> Store:
    """The store of the agents; the first node's listens on ``host`` only, where torch's own would listen on every interface."""
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
