"""Another user tries every port of a job without a key, with a wrong one, or at a poisoned rendezvous."""

from __future__ import annotations

import contextlib
import datetime
import encodings.idna  # noqa: F401  # sockets need it, and a stranger may not be able to read this Python
import http.client
import itertools
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it without saying so

from tepo_megatron.runtime.proc import Process
from tepo_megatron.tools.faults.processes import in_fork, listening
from tepo_megatron.tools.faults.workshop import FaultClass, FaultOutcome, differences

T = TypeVar("T")
_NOBODY = 65534
PATIENCE_S = 30.0

_ROUTES = (
    "/inference/v1/generate",
    "/tepo/samples",
    "/tepo/samples/abort",
    "/collective_rpc",
    "/update_weights",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/finish_weight_update",
    "/sleep",
    "/pause",
    "/reset_prefix_cache",
    "/v1/completions",
    "/openapi.json",
    "/metrics",
)


def _request(port: int, route: str, key: str) -> list[int]:
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    codes = []
    for method, body in (("GET", None), ("POST", "{}")):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
            try:
                connection.request(method, route, body=body, headers=headers)
                codes.append(connection.getresponse().status)
            except (OSError, http.client.HTTPException):
                codes.append(0)
    return codes


def _write_to_store(proof: Path, runs_code: bool, port: int) -> bool:
    value = f"cposix\nsystem\n(S'touch {proof}'\ntR.".encode() if runs_code else b"stranger"
    names = ["tepo_stranger", "torch.rendezvous.state", "/torch.rendezvous.state"] if runs_code else ["tepo_stranger"]
    try:
        patience = datetime.timedelta(seconds=PATIENCE_S / 3)
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=patience)
        for name in names:
            store.set(name, value)  # type: ignore[arg-type]  # bytes are taken, too
        return bool(store.get("tepo_stranger") == value)
    except RuntimeError:  # torch raises it for sockets
        return False


def _at_every_port(work: Callable[[int], object], ports: Sequence[int]) -> list[int]:
    took: list[int] = []

    def attempt(port: int) -> None:
        if work(port):
            took.append(port)

    threads = [threading.Thread(target=attempt, args=(port,), daemon=True) for port in ports]
    for thread in threads:
        thread.start()
    end = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return sorted(took)


def _send(payload: bytes, port: int) -> None:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.settimeout(2)
        connection.sendall(payload)
        connection.recv(4096)


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


def as_stranger(work: Callable[..., T], *arguments: Any, limit_s: float = 120.0) -> T | None:
    """Uses a fork: another user may not read this Python. Returns None after ``limit_s``."""

    def attempt() -> T:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
        return work(*arguments)

    return in_fork(attempt, limit_s=limit_s)


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
        for port, key in itertools.product(servers, ("", "wrong", "Bearer")):
            codes = as_stranger(_request, port, route, key)
            if not codes or any(200 <= code < 300 for code in codes):
                return f"{route} at port {port} answered {codes} to the key {key!r}"
        return ""

    def _send(self, payload: bytes) -> str:
        as_stranger(_at_every_port, partial(_send, payload), self._ports())
        return "" if self._next_row() else f"the run ended: {self._run.said()}"

    def _next_row(self) -> bool:
        return self._run.wait_for_row(min(self._run.last_step + 1, self._run.steps))

    def _ports(self) -> list[int]:
        return sorted({port for _, port in listening(self._pids)})

    def _keys(self) -> set[str]:
        names = ("VLLM_API_KEY", "TEPO_RUN_KEY", "TEPO_KEY")
        return {result[name] for result in map(Process.environment, self._pids) for name in names if result.get(name)}

    def _environments(self) -> str:
        paths = (Path(f"/proc/{pid}/environ") for pid in self._pids if os.geteuid() == 0)  # others may read their own files
        return next((f"{path} can be read" for path in paths if as_stranger(lambda path=path: bool(content(path)))), "")

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
        written = as_stranger(_at_every_port, partial(_write_to_store, proof, runs_code), self._ports())
        if written is None:
            return "the stranger came to no end at the stores"
        self._next_row()
        if proof.exists():
            proof.unlink()
            return "a stranger's code ran as the run's user"
        return f"the stores at the ports {written} took a stranger's value" if written else ""


FAULTS: tuple[type[FaultClass], ...] = (_Strangers,)
