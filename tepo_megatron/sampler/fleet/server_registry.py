"""Where trainer and external servers meet: small files in a folder that all nodes share, each written whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import stat
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tepo_megatron.config.rollout_server import ServerConfig

_KEY = "key"
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Registration:
    """One life of a server: its address, and a name that its next life does not have."""

    url: str
    life: str


def shared_key(folder: Path) -> str:
    """The key of the folder's servers: made by whoever asks first, readable by its owner only.

    Raises RuntimeError if the folder cannot be written, or others than this user can write it or read the key.
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
    """Tell where server ``index`` is reached."""
    _write(folder / f"server-{index}.json", json.dumps(asdict(registration)))


def registered(folder: Path, index: int) -> Registration | None:
    """The newest registration of server ``index``, if there is one."""
    with suppress(FileNotFoundError):
        return Registration(**json.loads((folder / f"server-{index}.json").read_text()))
    return None


def claim(folder: Path, index: int, life: str) -> bool:
    """Take this life of server ``index`` for one trainer; False if one has it, whose weights it may hold."""
    try:
        (folder / f"server-{index}.{life}.claimed").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def retire(folder: Path, index: int, life: str) -> None:
    """Ask the node of server ``index`` to end this life of it and to start another."""
    _write(folder / f"server-{index}.retired", life)


def is_retired(folder: Path, index: int, life: str) -> bool:
    """Whether the trainer has asked for the end of this life."""
    with suppress(FileNotFoundError):
        return (folder / f"server-{index}.retired").read_text() == life
    return False


def with_own_address(config: ServerConfig) -> ServerConfig:
    """The config of external servers with ``host`` set to this machine's address on the nodes' inner network.

    Raises ValueError where the interface has no IPv4 address, or this machine's name stands for none that others reach.
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
