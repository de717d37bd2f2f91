"""Where ranks meet, so that they unpickle nothing from strangers (docs/decisions/015-rendezvous.md).

One machine's ranks meet in a file of a private folder; agents of several nodes as ``torchrun.py`` says.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import stat
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tepo_megatron.runtime.restarts import attempt
from tepo_megatron.runtime.supervise import folder_name, locked_folder

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

FOLDER_VARIABLE = "TEPO_RENDEZVOUS"

_CONNECT_TIMEOUT = timedelta(seconds=60)

_LONGEST_FOLDER = 66  # bytes; leaves room for a socket's name (107 in all)


def rank_store(world_size: int, timeout: timedelta) -> Store | None:
    """Every rank calls. Returns None if torch uses ``MASTER_ADDR`` (several nodes, torchrun by hand).

    Raises RuntimeError if other users may enter the folder.
    """
    # torch exports them without saying so
    from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

    if FOLDER_VARIABLE not in os.environ:
        if not attempt():
            return None
        # The store of the nodes' agents has what the ranks before have left there.
        agents = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, False, timeout, False)
        return PrefixStore(f"ranks-{attempt()}", agents)
    folder = Path(os.environ[FOLDER_VARIABLE])
    found = folder.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise RuntimeError(
            f"the ranks should meet in {folder} ({FOLDER_VARIABLE}), but other users may enter it; set it to 0700"
        )
    if os.environ["RANK"] == "0":  # the last to leave: without the store's file it would wait for minutes
        removals.callback(_remove_if_orphaned, folder, os.getppid())
    store: Store = FileStore(str(folder / f"attempt-{attempt()}"), world_size)
    store.set_timeout(timeout)
    return store


removals = contextlib.ExitStack()
atexit.register(removals.close)


def _remove_if_orphaned(folder: Path, agent: int) -> None:
    if os.getppid() != agent:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def private_folder() -> Path:
    """The folder has mode 0700, a path short enough for sockets, and is removed at this process's end."""
    ranks = os.environ.get(FOLDER_VARIABLE)
    parent, name = (ranks, "tepo-") if ranks else (tempfile.gettempdir(), f"{folder_name()}-")
    if len(os.fsencode(f"{parent}/{name}12345678")) > _LONGEST_FOLDER:
        parent, name = "/tmp", f"{folder_name()}-"  # noqa: S108
    return removals.enter_context(locked_folder(parent, name))


def refuse_pickles() -> None:
    """Torch's collectives of Python objects then raise RuntimeError, since ranks' connections have no keys.

    Raises ValueError for torchrun's dynamic rendezvous.
    """
    from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]

    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is not None and FOLDER_VARIABLE not in os.environ and os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") != "1":
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, None, False, _CONNECT_TIMEOUT, False)
        if not store.check([f"{run_id}/torchelastic/role_info/0"]):
            raise ValueError(
                "torchrun keeps the state of its dynamic rendezvous (--standalone, --rdzv-backend=c10d, or no --master-port on "
                "one machine) as a pickle that other users of this machine can replace by code of theirs; start the run with "
                "'tepo train', or write 'python -m tepo_megatron.runtime.torchrun' in place of 'torchrun'"
            )
    if not hasattr(distributed_c10d, "_unpickler"):
        raise RuntimeError("this torch has no distributed_c10d._unpickler, so that ranks would unpickle what others send")
    distributed_c10d._unpickler = _refuse_to_unpickle  # type: ignore[assignment]


def _refuse_to_unpickle(_bytes: object) -> NoReturn:
    raise RuntimeError(
        "a collective of Python objects (all_gather_object, broadcast_object_list, …) would unpickle what another process "
        "sent; send tensors or JSON (tepo_megatron.trainer.megatron.parallel.collectives)"
    )


@functools.cache
def share_gloo_thread() -> None:
    """Lets this process's gloo groups share one thread, also on a GPU. Call before the first group is made.

    Otherwise each group's thread wakes a hundred times a second, and Megatron makes about twenty groups.
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
