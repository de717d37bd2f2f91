"""``tepo environment serve`` runs environments for other machines: JSON over HTTP with a key, no pickle.

A trainer opens a session (``POST /sessions``), sends lists of ``[episode, call]`` (``…/calls``) and waits for lists of
``[episode, answer, error, lost, suspect, seconds]`` (``…/answers``).
"""

import hmac
import json
import secrets
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

import httpx

from tepo_megatron.config.reward import EnvironmentConfig
from tepo_megatron.config.rollout import SamplingConfig
from tepo_megatron.runtime.text import parse_json, read_json
from tepo_megatron.runtime.worker_child import running_time
from tepo_megatron.tasks.environments.protocol import END, EpisodeAnswer, Strangers, read_key
from tepo_megatron.tasks.environments.workers import EnvironmentWorkers

_SESSIONS = "/sessions"

_MAX_REQUEST_BYTES = 64 * 2**20
_UNREAD_BYTES = 2**16
"""Limits what a connection without the key may send."""

_TIMEOUT_S = 120.0
_LONGEST_WAIT_S = 60.0

_SESSION_TIMEOUT_S = 300.0

_POLL_INTERVAL_S = 0.002

_IDLE_S = 0.5


def _shared_settings(config: EnvironmentConfig, sampling: SamplingConfig | None) -> dict[str, Any]:
    agent = {"agent": EnvironmentWorkers.shared_setup(config.agent_settings, sampling)} if config.adapter == "agent" else {}
    return {"name": config.name, "adapter": config.adapter, "kwargs": config.kwargs, **agent}


@dataclass(eq=False)
class _Session:
    answers: SimpleQueue[EpisodeAnswer] = field(default_factory=SimpleQueue)
    numbers: dict[int, int] = field(default_factory=dict)
    seen: float = field(default_factory=running_time)


class EnvironmentService:
    """Whoever has ``key`` can run the environment. Port 0: any free one. Raises OSError if the address is not available."""

    def __init__(
        self, config: EnvironmentConfig, *, host: str, port: int, key: str, sampling: SamplingConfig | None = None
    ) -> None:
        self._described, self._key = _shared_settings(config, sampling), key
        self._inbox: SimpleQueue[tuple[_Session, list[Any]]] = SimpleQueue()
        self._sessions: dict[str, _Session] = {}
        self._owners: dict[int, tuple[_Session, int]] = {}
        self._numbers = count()
        self._stopped = False
        self._http = _Server((host, port), _Handler)
        self._http.service = self
        self.url = f"http://{host}:{self._http.server_port}"
        try:
            self._workers = EnvironmentWorkers(config, sampling)
        except BaseException:
            self._http.server_close()
            raise
        self.notice = self._workers.notice

    def serve(self) -> None:
        """Returns after ``stop``."""
        threading.Thread(target=self._http.serve_forever, args=(0.05,), name="environment-http", daemon=True).start()
        try:
            while not self._stopped:
                self._work()
        finally:
            self._http.shutdown()
            self._http.server_close()
            self._workers.close()

    def stop(self) -> None:
        """Threads and signal handlers may call it, so it takes no lock: an Event has one, and ``running_time``."""
        self._stopped = True
        self._inbox.put((_Session(seen=0.0), []))  # wakes an idle service

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
        if call[0] != "step":
            self._forget(session, episode)
        if call[0] == "reset" and session in list(self._sessions.values()):
            session.numbers[episode] = next(self._numbers)
            self._owners[session.numbers[episode]] = (session, episode)
        number = session.numbers.get(episode)
        if number is not None:  # otherwise its worker was lost, and the trainer receives that
            self._workers.call(number, call)

    def _forget(self, session: _Session, episode: int) -> None:
        number = session.numbers.pop(episode, None)
        if number is not None:
            del self._owners[number]
            self._workers.end(number)

    def _end_forgotten(self) -> None:
        now = running_time()
        for name, session in list(self._sessions.items()):
            if now - session.seen > _SESSION_TIMEOUT_S:
                del self._sessions[name]
                for episode in list(session.numbers):
                    self._forget(session, episode)

    def knows(self, authorization: str) -> bool:
        return hmac.compare_digest(authorization.encode(), f"Bearer {self._key}".encode())

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if method == "POST" and path == _SESSIONS:
            described = body.get("environment") if isinstance(body, dict) else None
            if described != self._described:
                sentence = f"this server runs {self._described}, not {described}; start it with the run's configuration"
                return 409, {"error": sentence}
            name = secrets.token_hex(8)
            self._sessions[name] = _Session()
            return 200, {"session": name, "notice": self.notice}
        folder, _, rest = path.removeprefix("/").partition("/")
        name, _, what = rest.partition("/")
        session = self._sessions.get(name) if f"/{folder}" == _SESSIONS else None
        if session is None:
            return 404, {"error": "no such session"}
        session.seen = running_time()
        match method, what, body:
            case "DELETE", "", _:
                session.seen = -_SESSION_TIMEOUT_S  # the serving thread ends it
                return 200, {}
            case "POST", "calls", list() if all(map(_is_call, body)):
                self._inbox.put((session, body))
                return 200, {}
            case "POST", "answers", {"wait_s": int() | float() as seconds} if 0 <= seconds <= 3600:
                return 200, [list(vars(answer).values()) for answer in _take(session.answers, min(seconds, _LONGEST_WAIT_S))]
        return 400, {"error": "neither calls nor a question for answers"}


def _is_call(item: Any) -> bool:
    match item:
        case [int(), ["reset", [str(), str(), str(), dict(), list(), str()], int(), bool()] | ["end"]]:
            return True
        case [int(), ["step", str(), str(), str()] | ["step", str(), str(), str(), int()]]:
            return True
    return False


def _take(queue: SimpleQueue[Any], wait_s: float | None) -> list[Any]:
    """Waits for the first one only."""
    results = []
    with suppress(Empty):
        results.append(queue.get(timeout=wait_s))
        while True:
            results.append(queue.get_nowait())
    return results


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    service: EnvironmentService

    def __init__(self, *args: Any) -> None:
        self.strangers = Strangers()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.strangers.add(request, lambda: _hang_up(request))
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.strangers.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a disconnected trainer is not an error
            super().handle_error(request, client_address)


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # its thread reads the end, and closes it
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10.0  # until it has shown the key
    disable_nagle_algorithm = True  # a reply is two writes
    server: _Server

    def _do(self) -> None:
        text, known = self.headers.get("Content-Length", "0"), self.server.service.knows(self.headers.get("Authorization", ""))
        length = int(text) if text.isdecimal() and len(text) < 20 else _MAX_REQUEST_BYTES + 1
        if known:
            self.server.strangers.discard(self.request)
            self.connection.settimeout(_TIMEOUT_S)
        # Also without the key: a client whose body is not read may lose the answer.
        raw = self.rfile.read(length) if length <= (_MAX_REQUEST_BYTES if known else _UNREAD_BYTES) else None
        if not known or raw is None:
            self.close_connection = True
            too_long = f"a request has at most {_MAX_REQUEST_BYTES} bytes, and says how many"
            self._reply(413 if known else 401, {"error": too_long if known else "another key"})
            return
        try:
            body = read_json(raw, "the request") if raw else None
        except ValueError as error:
            self._reply(400, {"error": str(error)})
            return
        self._reply(*self.server.service.answer(self.command, self.path, body))

    do_POST = do_DELETE = _do

    def _reply(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """A line per turn would fill the log."""


_WAIT_S = 10.0

_EXTRA_TIME_S = 20.0

_RETRY_INTERVAL_S = 10.0

_REOPEN_TIMEOUT_S = 60.0


@dataclass(eq=False)
class _RemoteServer:
    url: str
    http: httpx.Client
    session: str = ""
    episodes: set[int] = field(default_factory=set)
    owed: set[int] = field(default_factory=set)
    outbox: SimpleQueue[str | None] = field(default_factory=SimpleQueue)
    gone: str = ""


class RemoteEnvironments:
    """A failed server's episodes begin again on the others; it is asked again from time to time. Raises ValueError for a wrong
    address, key or environment, RuntimeError if no server answers.
    """

    def __init__(self, config: EnvironmentConfig, sampling: SamplingConfig | None = None) -> None:
        assert config.key_file is not None, "the configuration asks for one"
        key = read_key(config.key_file)
        self._config, self._wanted = config, _shared_settings(config, sampling)
        self._inbox: SimpleQueue[tuple[_RemoteServer, list[EpisodeAnswer] | str | _RemoteServer]] = SimpleQueue()
        self._home: dict[int, _RemoteServer] = {}
        self._answers: list[EpisodeAnswer] = []
        self._closed = threading.Event()
        self._servers: list[_RemoteServer] = []
        self.notice: str | None = None
        try:
            for url in config.servers:
                headers, timeout = {"Authorization": f"Bearer {key}"}, _WAIT_S + _EXTRA_TIME_S
                http = httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)
                try:
                    server = self._open(url, http)
                except RuntimeError as error:
                    server = _RemoteServer(url, http, gone=str(error))
                self._servers.append(server)
            gone = "; ".join(server.gone for server in self._servers if server.gone)
            if all(server.gone for server in self._servers):
                raise RuntimeError(f"environment.servers: {gone}")
            self.notice = "; ".join(filter(None, (self.notice, gone))) or None
        except BaseException:
            self.close()
            raise
        for server in self._servers:
            self._start(server)

    @property
    def busy(self) -> bool:
        return bool(self._answers) or any(server.owed for server in self._servers)

    def call(self, episode: int, call: list[Any]) -> None:
        # Not the client's json=, which refuses what a data file may have, such as NaN.
        text = json.dumps([episode, call])
        if len(text) + 2 > _MAX_REQUEST_BYTES:
            error = f"a call of {len(text)} bytes, and an environment server takes {_MAX_REQUEST_BYTES}; shorten the problem"
            self._answers.append(EpisodeAnswer(episode, error=error))
            return
        server = self._home.get(episode) or self._least_busy()
        self._home[episode] = server
        server.episodes.add(episode)
        server.owed.add(episode)
        server.outbox.put(text)

    def end(self, episode: int) -> None:
        self._answers = [item for item in self._answers if item.episode != episode]
        server = self._home.pop(episode, None)
        if server is not None:
            server.episodes.discard(episode)
            server.owed.discard(episode)
            server.outbox.put(json.dumps([episode, END]))

    def poll(self, timeout_s: float) -> Sequence[EpisodeAnswer]:
        self._take_messages(max(timeout_s, 0.001) if self.busy and not self._answers else 0.001)
        result, self._answers = self._answers, []
        return result

    def close(self) -> None:
        self._closed.set()
        for server in self._servers:
            server.outbox.put(None)
            if server.session:
                with suppress(httpx.HTTPError):  # the server ends unused sessions
                    server.http.delete(f"{_SESSIONS}/{server.session}", timeout=2.0)
            server.http.close()
        self._servers = []

    def _open(self, url: str, http: httpx.Client) -> _RemoteServer:
        server = _RemoteServer(url, http)
        try:
            reply = http.post(_SESSIONS, json={"environment": self._wanted})
        except httpx.HTTPError as error:
            raise RuntimeError(f"{url} does not answer ({error or type(error).__name__})") from error
        if reply.status_code == 401:
            raise ValueError(f"environment.servers: {url} has another key than environment.key_file = {self._config.key_file}")
        if reply.is_error:
            raise ValueError(f"environment.servers: {url}: {reply.text[:500]}")
        try:
            match parse_json(reply.content, "the answer"):
                case {"session": str() as session, "notice": None | str() as notice} if session.isalnum() and session.isascii():
                    server.session, self.notice = session, self.notice or notice
                    return server
            raise ValueError(f"the answer is no session: {reply.text[:60]!r}")
        except ValueError as error:
            raise ValueError(f"environment.servers: {url} is no environment server: {error}; correct the address") from error

    def _start(self, server: _RemoteServer) -> None:
        for work in (self._hand_over, self._listen):
            threading.Thread(target=work, args=(server,), name="environment-server", daemon=True).start()

    def _least_busy(self) -> _RemoteServer:
        start = running_time()
        while not (alive := [server for server in self._servers if not server.gone]):
            if running_time() - start >= _REOPEN_TIMEOUT_S:
                gone = "; ".join(server.gone for server in self._servers)
                raise RuntimeError(f"no environment server is left: {gone}; start them again (tepo environment serve)")
            self._take_messages(1.0)
        return min(alive, key=lambda server: len(server.episodes))

    def _take_messages(self, timeout_s: float) -> None:
        for server, message in _take(self._inbox, timeout_s):
            if isinstance(message, _RemoteServer):
                self._servers[self._servers.index(server)] = message
            else:
                self._take_answers(server, message)

    def _take_answers(self, server: _RemoteServer, answers: list[EpisodeAnswer] | str) -> None:
        if isinstance(answers, str):
            server.gone = server.gone or f"{server.url} {answers}"
            server.outbox.put(None)
            answers = [EpisodeAnswer(episode, lost=server.gone) for episode in sorted(server.episodes)]
        for answer in answers:
            if self._home.get(answer.episode) is server:
                server.owed.discard(answer.episode)
                if answer.lost is not None:
                    server.episodes.discard(answer.episode)
                    del self._home[answer.episode]
                self._answers.append(answer)

    def _hand_over(self, server: _RemoteServer) -> None:
        while not self._closed.is_set() and not server.gone:
            calls = _take(server.outbox, None)
            if None in calls:
                return
            for request in _requests(calls):
                if not server.gone:
                    self._post(server, "calls", request)

    def _listen(self, server: _RemoteServer) -> None:
        while not self._closed.is_set() and not server.gone:
            answers = self._post(server, "answers", json.dumps({"wait_s": _WAIT_S}), list)
            if answers is None:
                break
            try:
                self._inbox.put((server, [EpisodeAnswer.read(values) for values in answers]))
            except ValueError:
                self._inbox.put((server, f"answered with something else: {str(answers)[:60]}"))
                break
        while not self._closed.wait(_RETRY_INTERVAL_S):
            try:
                opened = self._open(server.url, server.http)
            except (RuntimeError, ValueError) as error:
                server.gone = str(error).removeprefix("environment.servers: ")
            else:
                with suppress(httpx.HTTPError, RuntimeError):  # its episodes would keep the server full
                    server.http.delete(f"{_SESSIONS}/{server.session}")
                self._inbox.put((server, opened))
                self._start(opened)
                return

    def _post(self, server: _RemoteServer, what: str, content: str, kind: type = object) -> Any:
        try:
            path, headers = f"{_SESSIONS}/{server.session}/{what}", {"Content-Type": "application/json"}
            reply = server.http.post(path, content=content, headers=headers)
            if reply.is_success:
                return parse_json(reply.content, "the answer", kind)
            failure = f"answered with status {reply.status_code}: {reply.text[:500]}"
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed
            failure = f"does not answer: {str(error) or type(error).__name__}"
        except ValueError as error:
            failure = f"answered with something else: {error}"
        if not self._closed.is_set():
            self._inbox.put((server, " ".join(failure.split())))
        return None


def _requests(calls: Iterable[str]) -> Iterator[str]:
    piece, size = list[str](), 0
    for call in calls:
        if piece and size + len(call) > _MAX_REQUEST_BYTES // 8:
            yield f"[{','.join(piece)}]"
            piece, size = [], 0
        piece.append(call)
        size += len(call) + 1
    yield f"[{','.join(piece)}]"
