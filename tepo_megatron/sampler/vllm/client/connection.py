"""HTTP connections to one server, with errors by kind of fault."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from tepo_megatron.sampler.vllm.server.server_program import IDLE_CONNECTION_S


class ServerFault(RuntimeError):  # noqa: N818
    """A server gave no answer or a wrong one. Another server, or a second try, may succeed."""

    def __init__(self, message: str, *, url: str = "") -> None:
        super().__init__(message)
        self.url = url


class ServerSilent(ServerFault):
    """No answer or progress within ``rollout.server.request_timeout_s``. The server's processes may still live."""


class ServerGone(ServerFault):
    """A server refuses connections, or reports a dead engine."""


class Connection:
    """POST requests with the run's ``key``, from several threads.

    Raises ServerSilent after ``timeout_s`` seconds, ServerFault if the server cannot be reached, fails (status 5xx) or does not
    answer with JSON, and RuntimeError for a refusal.
    """

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_CONNECTION_S),
            trust_env=False,  # a proxy of the environment has no business with the key
        )
        self._unbounded = httpx.Timeout(None, connect=min(timeout_s, 10.0))
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Requests of other threads fail at once, even if the server hangs."""
        with self._lock:
            for connection in self._sockets:
                with suppress(OSError):  # closed already
                    connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads, which closing does not
            self._sockets.clear()
        self._http.close()

    def _note_socket(self, event: str, info: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            with self._lock:
                self._sockets = {old for old in self._sockets if old.fileno() >= 0}
                self._sockets.add(info["return_value"].get_extra_info("socket"))

    def _post(self, path: str, body: dict[str, Any] | None = None, timeout: httpx.Timeout | None = None) -> dict[str, Any]:
        reply = self._send(path, body, timeout or self._http.timeout)
        try:
            return reply.json() if reply.content else {}
        except ValueError as error:
            where = f"POST {self.url}{path}"
            raise ServerFault(
                f"{where}: status {reply.status_code}, but the answer is not JSON: {reply.text[:200]!r}", url=self.url
            ) from error

    def _send(self, path: str, body: dict[str, Any] | None, timeout: httpx.Timeout) -> httpx.Response:
        with self._faults(path):
            reply = self._http.post(path, json=body, timeout=timeout, extensions={"trace": self._note_socket})
        self._check_status(path, reply)
        return reply

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[bytes]:
        traced = {"trace": self._note_socket}
        with (
            self._faults(path),
            self._http.stream("POST", path, json=body, timeout=self._unbounded, extensions=traced) as reply,
        ):
            if not reply.is_success:
                reply.read()
                self._check_status(path, reply)
            yield from reply.iter_raw()

    @contextmanager
    def _faults(self, path: str) -> Iterator[None]:
        where = f"POST {self.url}{path}"
        try:
            yield
        except httpx.TimeoutException as error:
            raise ServerSilent(
                f"{where}: no answer within {self._timeout_s:g} s (rollout.server.request_timeout_s, {type(error).__name__})",
                url=self.url,
            ) from error
        except (httpx.TransportError, httpx.StreamError) as error:
            raise ServerFault(f"{where}: {error or type(error).__name__}", url=self.url) from error
        except RuntimeError as error:
            if not self._http.is_closed or isinstance(error, ServerFault):
                raise
            raise ServerFault(f"{where}: {error or type(error).__name__}", url=self.url) from error

    def _check_status(self, path: str, reply: httpx.Response) -> None:
        if not reply.is_success:
            message = f"POST {self.url}{path}: status {reply.status_code}: {_message(reply)}"
            raise ServerFault(message, url=self.url) if reply.is_server_error else RuntimeError(message)


def _message(reply: httpx.Response) -> str:
    """vLLM puts its message under error.message or detail."""
    try:
        content = reply.json()
    except ValueError:
        return reply.text[:500] or "no explanation"
    found = content.get("error", content.get("detail", content)) if isinstance(content, dict) else content
    return str(found.get("message", found) if isinstance(found, dict) else found)[:2000]
