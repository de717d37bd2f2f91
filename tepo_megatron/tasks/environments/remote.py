"""The client of ``tepo environment serve``: episodes on other machines."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import httpx

from tepo_megatron.config.environment import EnvironmentConfig
from tepo_megatron.config.sampling import SamplingConfig
from tepo_megatron.tasks.environments.host import END, EpisodeAnswer, read_key
from tepo_megatron.tasks.environments.service import SESSION, shared_settings

_WAIT_S = 10.0

_EXTRA_TIME_S = 20.0


@dataclass(eq=False)
class _Server:
    url: str
    http: httpx.Client
    session: str = ""
    episodes: set[int] = field(default_factory=set)
    owed: set[int] = field(default_factory=set)
    outbox: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    gone: str = ""


class RemoteEnvironments:
    """A server that does not answer is not used again; its episodes begin again on the others. Two threads per server send
    calls and wait for answers.

    Raises ValueError: no key, another key, or another environment than a server's. RuntimeError: no server answers.
    """

    def __init__(self, config: EnvironmentConfig, sampling: SamplingConfig | None = None) -> None:
        assert config.key_file is not None, "the configuration asks for one"
        key = read_key(config.key_file)
        self._config, self._wanted = config, shared_settings(config, sampling)
        self._inbox: SimpleQueue[tuple[_Server, list[Any] | str]] = SimpleQueue()
        self._home: dict[int, _Server] = {}
        self._found: list[EpisodeAnswer] = []
        self._closed = threading.Event()
        self._servers: list[_Server] = []
        self._notice: str | None = None
        try:
            for url in config.servers:
                self._servers.append(self._open(url, key))
        except BaseException:
            self.close()
            raise
        for server in self._servers:
            for work in (self._hand_over, self._listen):
                threading.Thread(target=work, args=(server,), name="environment-server", daemon=True).start()

    @property
    def notice(self) -> str | None:
        return self._notice

    @property
    def busy(self) -> bool:
        return bool(self._found) or any(server.owed for server in self._servers)

    def call(self, episode: int, call: list[Any]) -> None:
        server = self._home.get(episode) or self._least_busy()
        self._home[episode] = server
        server.episodes.add(episode)
        server.owed.add(episode)
        server.outbox.put([episode, call])

    def end(self, episode: int) -> None:
        self._found = [item for item in self._found if item.episode != episode]
        server = self._home.pop(episode, None)
        if server is not None:
            server.episodes.discard(episode)
            server.owed.discard(episode)
            server.outbox.put([episode, END])

    def poll(self, timeout_s: float) -> Sequence[EpisodeAnswer]:
        with suppress(Empty):  # takes all available answers
            while True:
                self._take(*self._inbox.get(timeout=timeout_s if self.busy and not self._found and timeout_s > 0 else 0.001))
                timeout_s = 0.0
        result, self._found = self._found, []
        return result

    def close(self) -> None:
        self._closed.set()
        for server in self._servers:
            server.outbox.put(None)
            if server.session:
                with suppress(httpx.HTTPError):  # the server ends unused sessions
                    server.http.delete(f"{SESSION}/{server.session}", timeout=2.0)
            server.http.close()
        self._servers = []

    # -- private -----------------------------------------------------------------------------------------------------------

    def _open(self, url: str, key: str) -> _Server:
        http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=_WAIT_S + _EXTRA_TIME_S, trust_env=False
        )
        server = _Server(url, http)
        try:
            reply = http.post(SESSION, json={"environment": self._wanted})
        except httpx.HTTPError as error:
            raise RuntimeError(f"environment.servers: {url} does not answer ({error or type(error).__name__})") from error
        if reply.status_code == 401:
            raise ValueError(f"environment.servers: {url} has another key than environment.key_file = {self._config.key_file}")
        if reply.is_error:
            raise ValueError(f"environment.servers: {url}: {reply.text[:500]}")
        result = reply.json()
        server.session = result["session"]
        self._notice = self._notice or result["notice"]
        return server

    def _least_busy(self) -> _Server:
        alive = [server for server in self._servers if not server.gone]
        if not alive:
            gone = "; ".join(f"{server.url}: {server.gone}" for server in self._servers)
            raise RuntimeError(f"no environment server is left: {gone}; start them again (tepo environment serve)")
        return min(alive, key=lambda server: len(server.episodes))

    def _take(self, server: _Server, found: list[Any] | str) -> None:
        if isinstance(found, str):
            if server.gone:
                return
            server.gone = found
            for episode in sorted(server.episodes):
                del self._home[episode]
                self._found.append(EpisodeAnswer(episode, lost=f"{server.url} does not answer: {found}"))
            server.episodes.clear()
            server.owed.clear()
            return
        for episode, answer, error, lost, suspect, seconds in found:
            if self._home.get(episode) is server:
                server.owed.discard(episode)
                if lost is not None:
                    server.episodes.discard(episode)
                    del self._home[episode]
                self._found.append(EpisodeAnswer(episode, answer, error, lost, suspect, seconds))

    def _hand_over(self, server: _Server) -> None:
        while not self._closed.is_set():
            calls = [server.outbox.get()]
            while not server.outbox.empty():
                calls.append(server.outbox.get())
            if None in calls:
                return
            self._post(server, f"{SESSION}/{server.session}/calls", calls)

    def _listen(self, server: _Server) -> None:
        while not self._closed.is_set():
            answers = self._post(server, f"{SESSION}/{server.session}/answers", {"wait_s": _WAIT_S})
            if answers is None:
                return
            if answers:
                self._inbox.put((server, answers))

    def _post(self, server: _Server, path: str, body: Any) -> Any:
        try:
            reply = server.http.post(path, json=body)
            reply.raise_for_status()
            return reply.json()
        except (httpx.HTTPError, RuntimeError, ValueError) as error:  # RuntimeError: the client was closed
            if not self._closed.is_set():
                self._inbox.put((server, " ".join(str(error).split()) or type(error).__name__))
            return None
