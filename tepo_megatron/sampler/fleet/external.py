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
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tepo_megatron.config import RunConfig
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.sampler.vllm.server import is_healthy, make_servers

_KEY = "key"
_SIOCGIFADDR = 0x8915
_POLL_INTERVAL_S = 0.5
_WATCH_INTERVAL_S = 1.0


class Registration(NamedTuple):
    url: str
    life: str


class RegistryEntry:
    def __init__(self, folder: Path, index: int) -> None:
        self._path = folder / f"server-{index}"

    def register(self, registration: Registration) -> None:
        _write(self._path.with_suffix(".json"), json.dumps(registration._asdict()))

    def registered(self) -> Registration | None:
        with suppress(FileNotFoundError):
            return Registration(**json.loads(self._path.with_suffix(".json").read_text()))
        return None

    def claim(self, life: str) -> bool:
        """Returns False if another trainer has this life: the server may hold that one's weights."""
        try:
            self._path.with_suffix(f".{life}.claimed").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def retire(self, life: str) -> None:
        """The server's node then starts another life."""
        _write(self._path.with_suffix(".retired"), life)

    def is_retired(self, life: str) -> bool:
        with suppress(FileNotFoundError):
            return self._path.with_suffix(".retired").read_text() == life
        return False


def shared_key(folder: Path) -> str:
    """The first caller makes the key. Raises RuntimeError if another user can write the folder or read the key."""
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
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & forbidden:
        raise RuntimeError(
            f"{path} belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}, so that others can "
            f"{what}; remove it, or set rollout.server.registry to a new folder of yours"
        )


def with_local_address(config: ServerConfig) -> ServerConfig:
    """Sets this machine's address on the nodes' inner network."""
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


class ExternalServer:
    """Has the methods of ``Server``; ``start`` and ``stop`` only decide whether to wait for a server.

    Starting a failed server again retires it.
    """

    def __init__(self, config: ServerConfig, *, index: int, log: Path) -> None:
        assert config.registry is not None
        self.config, self.log, self.port = config, log, 0
        self._index, self._entry = index, RegistryEntry(config.registry, index)
        self._current: Registration | None = None
        self._retired = ""
        self._is_waiting = False

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
            self._entry.retire(self._retired)
        self._is_waiting = True

    def wait_ready(self, timeout_s: float | None = None) -> None:
        timeout_s = self.config.start_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while self._is_waiting:
            newest = self._entry.registered()
            if newest is not None and newest.life != self._retired and _is_healthy(newest):
                if self._entry.claim(newest.life):
                    self._current = newest
                    return
                self._retired = newest.life  # another trainer has put its weights into it
                self._entry.retire(newest.life)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"external rollout server {self._index} was not there within {timeout_s:g} s "
                    "(rollout.server.start_timeout_s); does 'tepo serve' run on its node, and is its registry "
                    f"{self.config.registry}? {self.log_end()}"
                )
            time.sleep(_POLL_INTERVAL_S)
        raise RuntimeError(f"waiting for external rollout server {self._index} was ended")

    def healthy(self) -> bool:
        return self._current is not None and _is_healthy(self._current)

    def stop(self) -> None:
        self._is_waiting = False
        if self._current is not None:
            self._retired, self._current = self._current.life, None

    def log_end(self) -> str:
        return f"Its log is {self.log}"


def _is_healthy(registration: Registration) -> bool:
    parts = urlsplit(registration.url)
    return is_healthy(parts.hostname or "", parts.port or 0)


class Node:
    """A node's equal share of the servers."""

    def __init__(self, config: RunConfig, *, model_dir: Path, node: int, nodes: int) -> None:
        """Raises ValueError if the nodes cannot share the servers equally."""
        server = config.rollout.server
        share = _share(server, node, nodes)
        assert server.registry is not None
        self._entries = [RegistryEntry(server.registry, index) for index in share]
        self._servers = make_servers(
            with_local_address(server),
            share,
            key=shared_key(server.registry),
            model_dir=model_dir,
            dtype=config.model.dtype,
            log_dir=config.output / "logs",
            seed=config.seed,
            trained=True,
            adapter_rank=config.adapter_rank,
            tokenizer=config.rollout.sampling.needs_tokenizer,
        )
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

        Raises RuntimeError if a server does not start, or dies too often.
        """
        while True:
            states = enumerate(zip(self._servers, self._entries, self._lives, strict=True))
            gone = [slot for slot, (server, entry, life) in states if not server.alive or entry.is_retired(life)]
            if gone:
                self._restarts += len(gone)
                if self._restarts > self._max_restarts:
                    logs = "\n".join(self._servers[slot].log_end() for slot in gone)
                    raise RuntimeError(f"the servers of this node died {self._restarts} times; none is started again.\n{logs}")
                self._start(gone)
            time.sleep(_WATCH_INTERVAL_S)

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
            self._entries[slot].register(Registration(server.url, self._lives[slot]))


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
