"""What another user of this machine tries at the ports and files of a run."""

from __future__ import annotations

import base64
import http.client
import os
import pickle
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it without saying so

from tepo_megatron.tools.faults.strangers import as_stranger
from tests.support.programs import TIMEOUT_S

T = TypeVar("T")
PATIENCE_S = 60.0


def ask(work: Callable[..., T], *arguments: object) -> T:
    """What the other user finds out, as JSON. Without root, which alone can become another user, the test is skipped."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    answer = as_stranger(work, *arguments, limit_s=TIMEOUT_S)
    assert answer is not None, "the stranger came to no end"
    return answer


class Payload:
    """Unpickled, it makes an empty file, as the user who unpickles it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.path, "w")


def poison_stores(path: Path, *ports: int) -> list[str]:
    """Writes a pickle that makes the file ``path`` over everything in the stores at these ports; returns the keys."""
    payload = pickle.dumps(Payload(str(path)))
    found = []
    for port in _stores(ports):
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), False)
        for key in store.list_keys():
            found.append(key)
            # The state of a dynamic rendezvous is written in base64.
            store.set(key, base64.b64encode(payload) if "rendezvous" in key else payload)  # type: ignore[arg-type]
    return found


def _stores(ports: Sequence[int]) -> list[int]:
    """The ports at which a TCPStore listens: it answers a ping. All others have the same few seconds to say nothing."""
    with ThreadPoolExecutor(64) as pool:
        return [port for port, answers in zip(ports, pool.map(_is_store, ports), strict=True) if answers]


def _is_store(port: int) -> bool:
    validate, ping, magic = 0, 13, 0x3C85F7CE
    hello = bytes([validate]) + magic.to_bytes(4, "little") + bytes([ping]) + (4711).to_bytes(4, "little")
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(hello)
            return connection.recv(4) == (4711).to_bytes(4, "little")
    except OSError:
        return False


def ask_routes(url: str, routes: Iterable[tuple[str, str]]) -> list[list[Any]]:
    """The status of each (method, path) without a key, with a wrong one, with an empty one."""
    host, _, port = url.removeprefix("http://").partition(":")
    found = []
    for method, path in routes:
        for header in (None, "Bearer wrong", "Bearer ", "Basic d3Jvbmc6d3Jvbmc="):
            connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
            headers = {"Content-Type": "application/json"} | ({} if header is None else {"Authorization": header})
            if method == "WEBSOCKET":
                headers |= {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
                headers["Sec-WebSocket-Key"] = "AAAAAAAAAAAAAAAAAAAAAA=="
                connection.request("GET", path, headers=headers)
            else:
                connection.request(method, path, body="{}", headers=headers)
            try:
                status: int | str = connection.getresponse().status
            except OSError as error:
                status = repr(error)
            found.append([method, path, header, status])
            connection.close()
    return found


def send_garbage(*ports: int) -> list[int]:
    """Sends bytes to every port, several times, and keeps the connections open for a while; returns those that took them."""
    reached = []
    for port in ports:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(b"\x00" * 8 + os.urandom(4096))
            reached.append(port)
        except OSError:
            continue
    return reached


def read_files(*paths: object) -> list[str]:
    """Those of the files and sockets that the stranger can open."""
    return [path for path in map(str, paths) if _opens(path)]


def _opens(path: str) -> bool:
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
        else:
            with open(path, "rb"):
                pass
    except OSError:
        return False
    return True
