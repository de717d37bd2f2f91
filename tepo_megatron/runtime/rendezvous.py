"""Where ranks meet, so that they unpickle nothing from strangers (docs/decisions/015-rendezvous.md).

torchrun's dynamic rendezvous unpickles state from a store that any process may write. Here one machine's ranks meet in a file
of a private folder, and several nodes' agents in a JSON store on the first node.
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
from typing import TYPE_CHECKING, Any, NoReturn

from tepo_megatron.runtime.supervise import folder_name

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

BACKEND = "tepo"

FOLDER_VARIABLE = "TEPO_RENDEZVOUS"

CONNECT_TIMEOUT = timedelta(seconds=60)

LONGEST_FOLDER = 66  # bytes; leaves room for a socket's name (107 in all)


def run_agent(arguments: Sequence[str], folder: Path | None = None) -> None:
    """``arguments`` are torchrun's flags.

    Raises torchrun's errors, and ValueError for flags of a dynamic rendezvous.
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
    """Every rank calls. Returns None if torch uses ``MASTER_ADDR`` (several nodes, torchrun by hand).

    Raises RuntimeError if other users may enter the folder.
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
    if os.environ["RANK"] == "0":  # the last to leave: without the store's file it would wait for minutes
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
    while _removals:
        _removals.pop()()


def _remove_if_orphaned(folder: Path, agent: int) -> None:
    if os.getppid() != agent:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def private_folder() -> Path:
    """The folder has mode 0700, a path short enough for sockets, and is removed when this process ends."""
    ranks = os.environ.get(FOLDER_VARIABLE)
    parent, name = (ranks, "tepo-") if ranks else (tempfile.gettempdir(), f"{folder_name()}-")
    if len(os.fsencode(f"{parent}/{name}12345678")) > LONGEST_FOLDER:
        parent, name = "/tmp", f"{folder_name()}-"  # noqa: S108
    folder = tempfile.mkdtemp(prefix=name, dir=parent)  # mode 0700
    _at_end(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    return Path(folder)


def refuse_dynamic_rendezvous() -> None:
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
    """Torch's collectives of Python objects then raise RuntimeError, since connections between ranks have no keys."""
    from torch.distributed import distributed_c10d

    distributed_c10d._unpickler = _refuse_to_unpickle  # type: ignore[assignment]


def _refuse_to_unpickle(_bytes: object) -> NoReturn:
    raise RuntimeError(
        "a collective of Python objects (all_gather_object, broadcast_object_list, …) would unpickle what another process "
        "sent; send tensors or JSON (tepo_megatron.trainer.megatron.collectives)"
    )


def _make_handler(parameters: RendezvousParameters) -> RendezvousHandler:
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
    """The first node listens on ``host`` only; torch's own store would listen on every interface."""
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


@functools.cache
def share_gloo_thread() -> None:
    """Lets all of this process's gloo groups share one thread, also on a GPU. Call before the first group is made.

    Otherwise torch gives each group a thread that wakes a hundred times a second, and Megatron makes about twenty groups.
    """
    from torch import distributed

    gloo: Any = distributed.ProcessGroupGloo  # its options are not in torch's type stubs
    make, devices = gloo.__init__, list[Any]()

    def with_shared_devices(group: Any, *args: Any, timeout: timedelta | None = None) -> None:
        if timeout is None:
            return make(group, *args)
        if not devices:
            names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            devices.extend([gloo.create_device(interface=name) for name in names])
        if not devices:
            devices.append(gloo.create_default_device())
        options = gloo._Options()
        options._timeout, options._devices, options._threads = timeout, devices, 2 * len(devices)
        return make(group, *args, options)

    gloo.__init__ = with_shared_devices
