"""``tepo environment serve`` runs environments for other machines. JSON over HTTP with a key; nothing is unpickled.

A trainer opens a session (``POST /sessions``), sends calls (``…/calls``: a list of ``[episode, call]``) and waits for answers
(``…/answers``: a list of ``[episode, answer, error, lost, suspect, seconds]``).
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from tepo_megatron.config.environment import EnvironmentConfig
from tepo_megatron.config.sampling import SamplingConfig
from tepo_megatron.tasks.environments.host import EpisodeAnswer
from tepo_megatron.tasks.environments.workers import EnvironmentWorkers, shared_setup

SESSION = "/sessions"

_MAX_REQUEST_BYTES = 64 * 2**20

_SESSION_TIMEOUT_S = 300.0

_POLL_INTERVAL_S = 0.002

_IDLE_S = 0.5


def shared_settings(config: EnvironmentConfig, sampling: SamplingConfig | None) -> dict[str, Any]:
    agent = {"agent": shared_setup(config.agent_settings, sampling)} if config.adapter == "agent" else {}
    return {"name": config.name, "adapter": config.adapter, "kwargs": config.kwargs, **agent}


@dataclass(eq=False)
class _Session:
    answers: SimpleQueue[EpisodeAnswer] = field(default_factory=SimpleQueue)
    numbers: dict[int, int] = field(default_factory=dict)
    seen: float = field(default_factory=time.monotonic)


class EnvironmentService:
    """Port 0: any free one. ``sampling``: the run's settings, for agents. Whoever has ``key`` can run the environment. Raises
    as ``EnvironmentWorkers``, and OSError if the address is not available.
    """

    def __init__(
        self, config: EnvironmentConfig, *, host: str, port: int, key: str, sampling: SamplingConfig | None = None
    ) -> None:
        self._described, self._key = shared_settings(config, sampling), key
        self._inbox: SimpleQueue[tuple[_Session, list[Any]]] = SimpleQueue()
        self._sessions: dict[str, _Session] = {}
        self._owners: dict[int, tuple[_Session, int]] = {}
        self._numbers = count()
        self._stopped = threading.Event()
        self._http = _Server((host, port), _Handler)
        self._http.service = self
        self.url = f"http://{host}:{self._http.server_port}"
        try:
            self._workers = EnvironmentWorkers(config, sampling)
        except BaseException:
            self._http.server_close()
            raise

    @property
    def notice(self) -> str | None:
        return self._workers.notice

    def serve(self) -> None:
        """Returns after :meth:`stop`. Raises RuntimeError if a replaced worker does not start."""
        threading.Thread(target=self._http.serve_forever, name="environment-http", daemon=True).start()
        try:
            while not self._stopped.is_set():
                self._work()
        finally:
            self._http.shutdown()
            self._http.server_close()
            self._workers.close()

    def stop(self) -> None:
        """May be called from any thread or signal handler."""
        self._stopped.set()

    # -- serving thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            session, calls = self._inbox.get(timeout=_POLL_INTERVAL_S if self._workers.busy else _IDLE_S)
        except Empty:
            calls = []
        for episode, call in calls:
            self._hand_over(session, episode, call)
        for result in self._workers.poll(0.0):
            owner = self._owners.get(result.episode)
            if owner is not None:
                of, number = owner
                if result.lost is not None:
                    self._forget(of, number)
                of.answers.put(replace(result, episode=number))
        self._end_forgotten()

    def _hand_over(self, session: _Session, episode: int, call: list[Any]) -> None:
        if call[0] == "end":
            self._forget(session, episode)
            return
        if call[0] == "reset":
            self._forget(session, episode)
            number = session.numbers[episode] = next(self._numbers)
            self._owners[number] = (session, episode)
        result = session.numbers.get(episode)
        if result is not None:  # otherwise its worker was lost, and the trainer receives that
            self._workers.call(result, call)

    def _forget(self, session: _Session, episode: int) -> None:
        number = session.numbers.pop(episode, None)
        if number is not None:
            del self._owners[number]
            self._workers.end(number)

    def _end_forgotten(self) -> None:
        now = time.monotonic()
        for name, session in list(self._sessions.items()):
            if now - session.seen > _SESSION_TIMEOUT_S:
                del self._sessions[name]
                for episode in list(session.numbers):
                    self._forget(session, episode)

    # -- request threads ---------------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, key: str, body: Any) -> tuple[int, Any]:
        if not hmac.compare_digest(key.encode(), f"Bearer {self._key}".encode()):
            return 401, {"error": "another key"}
        parts = path.strip("/").split("/")
        if method == "POST" and path == SESSION:
            return self._begin_session(body)
        session = self._sessions.get(parts[1]) if len(parts) in (2, 3) and parts[0] == SESSION.strip("/") else None
        if session is None:
            return 404, {"error": "no such session"}
        session.seen = time.monotonic()
        if method == "DELETE" and len(parts) == 2:
            session.seen = -_SESSION_TIMEOUT_S  # the serving thread ends it
            return 200, {}
        if method == "POST" and parts[2:] == ["calls"] and _are_calls(body):
            self._inbox.put((session, body))
            return 200, {}
        if method == "POST" and parts[2:] == ["answers"] and isinstance(body, dict):
            return 200, _taken(session.answers, min(float(body.get("wait_s", 0.0)), 60.0))
        return 400, {"error": "neither calls nor a question for answers"}

    def _begin_session(self, body: Any) -> tuple[int, Any]:
        wanted, own = body.get("environment") if isinstance(body, dict) else None, self._described
        if wanted != own:
            return 409, {"error": f"this server runs {own}, not {wanted}; start it with the run's configuration"}
        name = secrets.token_hex(8)
        self._sessions[name] = _Session()
        return 200, {"session": name, "notice": self.notice}


def _are_calls(body: Any) -> bool:
    return isinstance(body, list) and all(
        isinstance(item, list) and len(item) == 2 and type(item[0]) is int and isinstance(item[1], list) and _is_call(item[1])
        for item in body
    )


def _is_call(call: list[Any]) -> bool:
    match call:
        case ["reset", [str(), str(), str(), dict(), list(), str()], int(), bool()] | ["end"]:
            return True
        case ["step", str(), str(), str()] | ["step", str(), str(), str(), int()]:
            return True
    return False


def _taken(answers: SimpleQueue[EpisodeAnswer], wait_s: float) -> list[list[Any]]:
    results = []
    try:
        results.append(answers.get(timeout=wait_s))
        while True:
            results.append(answers.get_nowait())
    except Empty:
        return [
            [result.episode, result.answer, result.error, result.lost, result.suspect, result.seconds] for result in results
        ]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    service: EnvironmentService

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a disconnected trainer is not an error
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 120.0
    server: _Server

    def _do(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > _MAX_REQUEST_BYTES:
            self.close_connection = True
            self._reply(413, {"error": f"a request has at most {_MAX_REQUEST_BYTES} bytes, and says how many"})
            return
        raw = self.rfile.read(int(length))
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            self._reply(400, {"error": "not JSON"})
            return
        self._reply(*self.server.service.answer(self.command, self.path, self.headers.get("Authorization", ""), body))

    do_POST = do_DELETE = _do

    def _reply(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Suppressed: one line per turn would fill the log."""
