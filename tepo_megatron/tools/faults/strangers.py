"""Another user tries every port of a job without a key, with a wrong one, or at a poisoned rendezvous."""

import base64
import contextlib
import datetime
import encodings.idna  # noqa: F401  # sockets need it, and a stranger may not be able to read this Python
import http.client
import itertools
import os
import random
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it without saying so

from tepo_megatron.runtime.proc import Process
from tepo_megatron.tools.faults.processes import in_fork, listening
from tepo_megatron.tools.faults.workshop import FaultClass, FaultOutcome, differences

T = TypeVar("T")
_NOBODY = 65534
PATIENCE_S = 10.0

_ROUTES = (
    *("/inference/v1/generate", "/tepo/samples", "/tepo/samples/abort", "/collective_rpc", "/update_weights"),
    *("/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update", "/sleep", "/pause"),
    *("/reset_prefix_cache", "/v1/completions", "/openapi.json", "/metrics"),
)
_METHODS = ("GET", "POST", "WEBSOCKET")
_WRONG_KEYS = (None, "Bearer wrong", "Bearer ", "Basic d3Jvbmc6d3Jvbmc=")
_WEBSOCKET = {
    **{"Upgrade": "websocket", "Connection": "Upgrade"},
    **{"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="},
}


def _ask_routes(port: int, routes: Iterable[tuple[str, str]]) -> list[list[Any]]:
    answers = []  # [method, path, authorization, status, or 0 without an answer]
    for (method, path), key in itertools.product(routes, _WRONG_KEYS):
        upgrade = _WEBSOCKET if method == "WEBSOCKET" else {}
        headers = {"Content-Type": "application/json", **({} if key is None else {"Authorization": key}), **upgrade}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
            try:
                connection.request("GET" if upgrade else method, path, None if upgrade else "{}", headers)
                status = connection.getresponse().status
            except (OSError, http.client.HTTPException):
                status = 0
        answers.append([method, path, key, status])
    return answers


def _pickle_that_makes(path: Path) -> bytes:
    return f"cposix\nsystem\n(S'touch {path}'\ntR.".encode()


def _overwrite_stores(value: bytes, ports: Sequence[int]) -> list[tuple[int, str]]:
    written = []
    for port in _where(_is_store, ports):
        with contextlib.suppress(RuntimeError):  # torch raises it for sockets
            patience = datetime.timedelta(seconds=PATIENCE_S)
            store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=patience)
            store.set("tepo_stranger", value)  # type: ignore[arg-type]  # takes bytes
            written.append((port, "tepo_stranger"))
            for key in store.list_keys():
                # The state of a dynamic rendezvous is written in base64.
                store.set(key, base64.b64encode(value) if "rendezvous" in key else value)  # type: ignore[arg-type]  # takes bytes
                written.append((port, key))
    return written


def _is_store(port: int) -> bool:
    # it answers a ping
    validate, magic, ping, number = b"\x00", (0x3C85F7CE).to_bytes(4, "little"), b"\x0d", (4711).to_bytes(4, "little")
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(validate + magic + ping + number)
        return connection.recv(4) == number
    return False


def _ports_that_take(payload: bytes, ports: Sequence[int]) -> list[int]:
    return _where(partial(_takes, payload), ports)


def _takes(payload: bytes, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(payload)
        connection.settimeout(2)
        with contextlib.suppress(OSError):
            connection.recv(4096)
        return True
    return False


def _where(condition: Callable[[int], bool], ports: Sequence[int]) -> list[int]:
    # all have the same few seconds to say nothing
    with ThreadPoolExecutor(64) as pool:
        return [port for port, is_true in zip(ports, pool.map(condition, ports), strict=True) if is_true]


def _can_open(paths: Iterable[str | Path]) -> list[str]:
    return [path for path in map(str, paths) if _opens(path)]


def _opens(path: str) -> bool:
    with contextlib.suppress(OSError):
        if os.path.exists(path) and not os.path.isfile(path):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
        else:
            with open(path, "rb"):
                pass
        return True
    return False


def plain_files(folder: Path) -> Iterator[Path]:
    """Skips files removed meanwhile (``Path.rglob`` would raise)."""
    for parent, _, names in os.walk(folder):
        yield from (path for name in names if (path := Path(parent, name)).is_file() and not path.is_symlink())


def content(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def _mode(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_mode & 0o777
    return 0


def as_stranger(work: Callable[..., T], *arguments: Any, limit_s: float = 120.0) -> T:
    """Uses a fork: another user may not read this Python. Raises TimeoutError after ``limit_s``."""

    def attempt() -> T:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
        return work(*arguments)

    answer: T | None = in_fork(attempt, limit_s=limit_s)
    if answer is None:
        raise TimeoutError(f"the stranger failed, or came to no end within {limit_s:g} s")
    return answer


class _Strangers(FaultClass):
    name = "strangers"
    title = "another user at every port, route, file and environment of a live run"
    whole, quick = len(_ROUTES) + 8, 6

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        run = self.workshop.live_run()
        run.wait_for_row(run.last_step)
        self._pids, self._run = run.pids, run
        others: dict[str, Callable[[], str]] = {
            "the run's key in the environment of its processes": self._environments,
            "the run's key on command lines": self._command_lines,
            "the run's key in its files": self._files,
            "a pickle that runs code, in every key-value store": lambda: self._stores(runs_code=True),
            "a value in every key-value store": lambda: self._stores(runs_code=False),
            "garbage at every port": lambda: self._send(rng.randbytes(64)),
            "an HTTP request at every other port": lambda: self._send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
            "files of the run that others may write": self._writable,
        }
        attempts = [item for pair in itertools.zip_longest(_ROUTES, others) for item in pair if item]
        what = attempts[number % len(attempts)]
        wrong = others[what]() if what in others else self._route(what)
        if not wrong and not run.running and not run.finished:
            wrong = f"the run ended: {run.said()}"
        if wrong := wrong or differences(run.out, self.workshop.reference()):
            return FaultOutcome(what, "lost", wrong)
        return FaultOutcome(what, "refused", "nothing was answered, changed or read")

    def _route(self, route: str) -> str:
        servers = {port for pid, port in listening(self._pids) if "api_server" in Process.command_line(pid)}
        for port in servers:
            asked = [(method, route) for method in _METHODS]
            limit_s = (len(asked) * len(_WRONG_KEYS) + 6) * PATIENCE_S  # also of a server that keeps silent
            for method, _, key, status in as_stranger(_ask_routes, port, asked, limit_s=limit_s):
                if 100 < status < 300:
                    return f"{method} {route} at port {port} answered {status} to the key {key!r}"
        return ""

    def _send(self, payload: bytes) -> str:
        as_stranger(_ports_that_take, payload, self._ports())
        return "" if self._next_row() else f"the run ended: {self._run.said()}"

    def _next_row(self) -> bool:
        return self._run.wait_for_row(min(self._run.last_step + 1, self._run.steps))

    def _ports(self) -> list[int]:
        return sorted({port for _, port in listening(self._pids)})

    def _keys(self) -> set[str]:
        names = ("VLLM_API_KEY", "TEPO_RUN_KEY", "TEPO_KEY")
        return {result[name] for result in map(Process.environment, self._pids) for name in names if result.get(name)}

    def _environments(self) -> str:
        paths = [f"/proc/{pid}/environ" for pid in self._pids if os.geteuid() == 0]  # others may read their own files
        return next((f"{path} can be read" for path in as_stranger(_can_open, paths)), "")

    def _command_lines(self) -> str:
        keys = self._keys()
        holders = (pid for pid in self._pids if any(key in Process.command_line(pid) for key in keys))
        return next((f"process {pid} shows it" for pid in holders), "")

    def _writable(self) -> str:
        writable = (path for path in plain_files(self._run.out) if _mode(path) & 0o002)
        return next((f"{path} may be written by others" for path in writable), "")

    def _files(self) -> str:
        keys = [key.encode() for key in self._keys()]
        readable = (path for path in plain_files(self._run.out) if _mode(path) & 0o077)
        holders = (path for path in readable if any(key in content(path) for key in keys))
        return next((f"{path} holds it, with mode {_mode(path):o}" for path in holders), "")

    def _stores(self, *, runs_code: bool) -> str:
        proof = Path("/tmp") / f"tepo-stranger-{os.getpid()}"  # noqa: S108  # a place that any user may write to
        proof.unlink(missing_ok=True)
        value = _pickle_that_makes(proof) if runs_code else b"stranger"
        written = sorted({port for port, _ in as_stranger(_overwrite_stores, value, self._ports())})
        self._next_row()
        if proof.exists():
            proof.unlink()
            return "a stranger's code ran as the run's user"
        return f"the stores at the ports {written} took a stranger's value" if written else ""


FAULTS: tuple[type[FaultClass], ...] = (_Strangers,)
