"""Servers that ``tepo serve`` runs on other nodes, registered on the shared disk."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tepo_megatron.config import RunConfig
from tepo_megatron.config.rollout_server import ServerConfig
from tepo_megatron.sampler.vllm.server.resources import (
    check_machine,
    raise_open_files,
    server_seed,
    weights_bytes,
    worker_cores,
)
from tepo_megatron.sampler.vllm.server.server import Server, has_gpu, is_healthy

_KEY = "key"
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Registration:
    """``life`` differs between the lives of one server."""

    url: str
    life: str


def shared_key(folder: Path) -> str:
    """The first caller makes the key. Raises RuntimeError if the folder cannot be written, or if another user can write it or
    read the key.
    """
    path = folder / _KEY
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_private(
            folder, stat.S_IWGRP | stat.S_IWOTH, "write to it: they could put a server of theirs in place of one of this run's"
        )
        if not path.exists():
            draft = folder / f".{_KEY}.{secrets.token_hex(8)}"
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(32))
            with suppress(FileExistsError):
                os.link(draft, path)  # of several that try at once, one wins
            draft.unlink()
        _check_private(path, stat.S_IRWXG | stat.S_IRWXO, "open it: they could change the weights of this run's servers")
        return path.read_text()
    except OSError as error:
        raise RuntimeError(
            f"the key of the rollout servers cannot be written to {folder} ({error.strerror}); "
            "set rollout.server.registry to a folder that all nodes can write"
        ) from error


def _check_private(path: Path, forbidden: int, what: str) -> None:
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & forbidden:
        raise RuntimeError(
            f"{path} belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}, so that others can {what}; "
            "remove it, or set rollout.server.registry to a new folder of yours"
        )


def register(folder: Path, index: int, registration: Registration) -> None:
    _write(folder / f"server-{index}.json", json.dumps(asdict(registration)))


def registered(folder: Path, index: int) -> Registration | None:
    """Returns the newest registration of server ``index``."""
    with suppress(FileNotFoundError):
        return Registration(**json.loads((folder / f"server-{index}.json").read_text()))
    return None


def claim(folder: Path, index: int, life: str) -> bool:
    """False if another trainer has this life: the server may hold that one's weights."""
    try:
        (folder / f"server-{index}.{life}.claimed").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def retire(folder: Path, index: int, life: str) -> None:
    """Asks the node of server ``index`` to end this life and start another."""
    _write(folder / f"server-{index}.retired", life)


def is_retired(folder: Path, index: int, life: str) -> bool:
    with suppress(FileNotFoundError):
        return (folder / f"server-{index}.retired").read_text() == life
    return False


def with_own_address(config: ServerConfig) -> ServerConfig:
    """Sets ``host`` to this machine's address on the nodes' inner network.

    Raises ValueError if the interface has no IPv4 address, or if others cannot reach this machine's.
    """
    if config.interface is not None:
        return config.model_copy(update={"host": _interface_address(config.interface)})
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise ValueError(
            f"this machine's name {socket.gethostname()!r} stands for no address ({error}); "
            "set rollout.server.interface to the interface of the nodes' inner network"
        ) from error
    if address.startswith("127."):
        raise ValueError(
            f"this machine's name {socket.gethostname()!r} stands for its loopback address {address}, which other nodes do not "
            "reach; set rollout.server.interface to the interface of the nodes' inner network (lo where all is on one machine)"
        )
    return config.model_copy(update={"host": address})


def _interface_address(name: str) -> str:
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError as error:
            known = ", ".join(interface for _, interface in socket.if_nameindex())
            raise ValueError(
                f"rollout.server.interface = {name!r} has no IPv4 address on {socket.gethostname()}; interfaces here: {known}"
            ) from error


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    draft.write_text(text)
    draft.replace(path)


_POLL_INTERVAL_S = 0.5


class ExternalServer:
    """Has the methods of ``Server``; ``start`` and ``stop`` only decide whether to wait for a server.

    Starting a failed server again retires it: its node registers another. ``log`` is the node's file.
    """

    def __init__(self, config: ServerConfig, *, folder: Path, index: int, log: Path) -> None:
        self.config, self.log, self.port = config, log, 0
        self._folder, self._index = folder, index
        self._current: Registration | None = None
        self._retired = ""
        self._wanted = False

    @property
    def url(self) -> str:
        return self._current.url if self._current else ""

    @property
    def alive(self) -> bool:
        return self._current is not None

    def start(self, taken: Collection[int] = ()) -> None:
        if self._current is not None:
            self._retired, self._current = self._current.life, None
        if self._retired:
            retire(self._folder, self._index, self._retired)
        self._wanted = True

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Raises RuntimeError after the time-out or :meth:`stop`."""
        timeout_s = self.config.start_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while self._wanted:
            found = registered(self._folder, self._index)
            if found is not None and found.life != self._retired and _is_healthy(found):
                if claim(self._folder, self._index, found.life):
                    self._current = found
                    return
                self._retired = found.life  # another trainer has put its weights there
                retire(self._folder, self._index, found.life)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"external rollout server {self._index} was not there within {timeout_s:g} s "
                    "(rollout.server.start_timeout_s); does 'tepo serve' run on its node, and is its registry "
                    f"{self._folder}? {self.log_end()}"
                )
            time.sleep(_POLL_INTERVAL_S)
        raise RuntimeError(f"waiting for external rollout server {self._index} was ended")

    def healthy(self) -> bool:
        return self._current is not None and _is_healthy(self._current)

    def stop(self) -> None:
        self._wanted = False
        if self._current is not None:
            self._retired, self._current = self._current.life, None

    def log_end(self, lines: int = 0) -> str:
        return f"Its log is {self.log}"


def external_servers(config: ServerConfig, log_dir: Path) -> tuple[ServerConfig, str, list[ExternalServer]]:
    """Returns the config with this machine's address as ``host``, the key, and the servers."""
    config = with_own_address(config)
    folder = config.registry
    assert folder is not None
    servers = [
        ExternalServer(config, folder=folder, index=index, log=log_dir / f"server-{index}.log") for index in range(config.count)
    ]
    return config, shared_key(folder), servers


def _is_healthy(registration: Registration) -> bool:
    parts = urlsplit(registration.url)
    return is_healthy(parts.hostname or "", parts.port or 0)


_WATCH_INTERVAL_S = 1.0


class Node:
    """An equal share of ``rollout.server.count`` servers, for one node. A context manager.

    Each is registered when it answers. ``rollout.server.load_format`` decides what weights it has until the first update.
    """

    def __init__(self, config: RunConfig, *, model_dir: Path, node: int, nodes: int) -> None:
        """Raises ValueError if servers cannot be spread over the nodes, or this node has no address on their network."""
        server = config.rollout.server
        share = _share(server, node, nodes)
        assert server.registry is not None
        raise_open_files()
        check_machine(server, len(share), weights_bytes=weights_bytes(model_dir), on_gpu=has_gpu())
        self._folder, self._first = server.registry, share.start
        own = with_own_address(server)
        cores = worker_cores(own, len(share))
        key = shared_key(server.registry)
        self._servers = [
            Server(
                own,
                model_dir=model_dir,
                dtype=own.served_dtype(config.model.dtype),
                cores=cores[slot],
                key=key,
                log=config.output / "logs" / f"server-{index}.log",
                seed=server_seed(config.seed, index),
                gpus=range(slot * own.tp, (slot + 1) * own.tp),
                dummy=config.adapter_rank is None and own.starts_with_dummies(trained=True),
                adapter_rank=config.adapter_rank,
                tokenizer=config.servers_need_tokenizer,
            )
            for slot, index in enumerate(share)
        ]
        self._lives = [""] * len(self._servers)
        self._restarts = 0
        self._max_restarts = server.max_restarts * len(self._servers)

    def __enter__(self) -> Node:
        try:
            self._start(list(range(len(self._servers))))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        for server in self._servers:
            server.stop()

    def watch(self) -> None:
        """Replaces dead and retired servers until interrupted.

        Raises RuntimeError with the end of a log if a server does not start, or after more than
        ``rollout.server.max_restarts`` times the node's servers.
        """
        while True:
            gone = [slot for slot in range(len(self._servers)) if self._is_gone(slot)]
            if gone:
                self._restarts += len(gone)
                if self._restarts > self._max_restarts:
                    logs = "\n".join(self._servers[slot].log_end() for slot in gone)
                    raise RuntimeError(f"the servers of this node died {self._restarts} times; none is started again.\n{logs}")
                self._start(gone)
            time.sleep(_WATCH_INTERVAL_S)

    def _is_gone(self, slot: int) -> bool:
        return not self._servers[slot].alive or is_retired(self._folder, self._first + slot, self._lives[slot])

    def _start(self, slots: list[int]) -> None:
        for slot in slots:
            self._servers[slot].stop()
        taken = {server.port for server in self._servers if server.alive}
        for slot in slots:
            self._servers[slot].start(taken)
            taken.add(self._servers[slot].port)
        for slot in slots:
            server, self._lives[slot] = self._servers[slot], secrets.token_hex(8)
            server.wait_ready()
            register(self._folder, self._first + slot, Registration(server.url, self._lives[slot]))


def _share(config: ServerConfig, node: int, nodes: int) -> range:
    if config.placement != "external":
        raise ValueError(
            "tepo serve needs rollout.server.placement = external and rollout.server.registry, a folder that it shares with "
            "the trainer; with placement = local, 'tepo train' starts the servers itself"
        )
    if not 0 <= node < nodes:
        raise ValueError(f"node {node} is not one of {nodes} nodes; number them from 0")
    if config.count % nodes:
        raise ValueError(f"rollout.server.count = {config.count} servers cannot be spread over {nodes} nodes; give a multiple")
    size = config.count // nodes
    return range(node * size, (node + 1) * size)
