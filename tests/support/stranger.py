"""Another user of this machine, uid 65534, who tries what the ports of a run give away. Needs a test that runs as root.

``python -m tests.support.stranger WHAT ARGUMENTS...`` imports what it needs, gives every right up, and prints JSON. It is not
started as the other user, because the interpreter may lie in a folder that only its owner enters.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

NOBODY = 65534
PATIENCE_S = 60.0


def ask(what: str, *arguments: object) -> Any:
    """Starts the stranger and returns what it found out."""
    command = [sys.executable, "-m", "tests.support.stranger", what, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


class Payload:
    """Unpickled, it makes an empty file, as the user who unpickles it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.path, "w")


def poison_stores(path: str, *ports: str) -> list[str]:
    """Writes a pickle that makes the file ``path`` over everything in the stores at these ports; returns the keys."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    become_nobody()
    payload = pickle.dumps(Payload(path))
    found = []
    for port in _stores(ports):
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10), False)
        for key in store.list_keys():
            found.append(key)
            # The state of a dynamic rendezvous is written in base64.
            store.set(key, base64.b64encode(payload) if "rendezvous" in key else payload)  # type: ignore[arg-type]
    return found


def _stores(ports: Iterable[str]) -> list[int]:
    """The ports at which a TCPStore listens: it answers a ping. All others have the same few seconds to say nothing."""
    numbers = [int(port) for port in ports]
    with ThreadPoolExecutor(64) as pool:
        return [port for port, answers in zip(numbers, pool.map(_is_store, numbers), strict=True) if answers]


def _is_store(port: int) -> bool:
    validate, ping, magic = 0, 13, 0x3C85F7CE
    hello = bytes([validate]) + magic.to_bytes(4, "little") + bytes([ping]) + (4711).to_bytes(4, "little")
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(hello)
            return connection.recv(4) == (4711).to_bytes(4, "little")
    except OSError:
        return False


def ask_routes(url: str, routes: str) -> list[list[Any]]:
    """The status of each [method, path] without a key, with a wrong one, with an empty one."""
    become_nobody()
    host, _, port = url.removeprefix("http://").partition(":")
    found = []
    for method, path in json.loads(routes):
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


def send_garbage(*ports: str) -> list[int]:
    """Sends bytes to every port, several times, and keeps the connections open for a while; returns those that took them."""
    become_nobody()
    reached = []
    for port in map(int, ports):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                connection.sendall(b"\x00" * 8 + os.urandom(4096))
            reached.append(port)
        except OSError:
            continue
    return reached


def read_files(*paths: str) -> list[str]:
    """Those of the files and sockets that the stranger can open."""
    become_nobody()
    return [path for path in paths if _opens(path)]


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


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.chdir("/")


def main(arguments: Iterable[str]) -> None:
    what, *rest = arguments
    "".encode("idna")  # its codec is imported now, while the stranger may still read the interpreter's folder
    act = {act.__name__: act for act in (poison_stores, ask_routes, send_garbage, read_files)}[what]
    print(json.dumps(act(*rest)))


if __name__ == "__main__":
    main(sys.argv[1:])
