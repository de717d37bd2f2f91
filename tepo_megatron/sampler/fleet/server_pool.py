from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.sampler.fleet.external import ExternalServer, shared_key, with_local_address
from tepo_megatron.sampler.fleet.stream import Lane
from tepo_megatron.sampler.fleet.sync import WeightSync
from tepo_megatron.sampler.protocol import FAULT_FIGURES, INITIAL_WEIGHTS, ServerDied
from tepo_megatron.sampler.vllm.client import Client, ServerFault, ServerGone, ServerSilent
from tepo_megatron.sampler.vllm.resources import connections, read_vocab_size
from tepo_megatron.sampler.vllm.server import Server, for_all_at_once, make_servers
from tepo_megatron.weights.architecture import read_model_spec


@dataclass
class Restarts:
    most: int
    done: int = 0
    first_cause: str = ""

    def blame(self, cause: object) -> None:
        """Keeps the first cause, since later ones may be consequences."""
        self.first_cause = self.first_cause or str(cause).partition("\n")[0]

    def add(self, count: int, logs: str) -> None:
        """Call it before the restarts. Raises RuntimeError if they are too many."""
        if self.done + count > self.most:
            first = f" The first failure was: {self.first_cause}." if self.first_cause else ""
            raise RuntimeError(
                f"rollout servers died {self.done + count} times; rollout.server.max_restarts = {self.most}.{first}\n{logs}"
            )
        self.done += count


class Roster:
    """All servers but those in ``_lost`` have the weights ``_version``."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        model_dir: Path,
        dtype: str,
        stop_token_ids: Sequence[int],
        log_dir: Path,
        seed: int = 0,
        first_gpu: int = 0,
        report: Callable[[str], None] = lambda sentence: None,
        keep_cache: bool = False,
        trained: bool = False,
        adapter_rank: int | None = None,
        tokenizer: bool = False,
    ) -> None:
        self._starts_empty = adapter_rank is not None or config.starts_with_dummies(trained=trained)
        self._servers: Sequence[Server | ExternalServer]
        if config.placement == "external":
            config = with_local_address(config)
            assert config.registry is not None
            self._key = shared_key(config.registry)
            logs = [log_dir / f"server-{index}.log" for index in range(config.count)]
            self._servers = [ExternalServer(config, index=index, log=log) for index, log in enumerate(logs)]
        else:
            self._key = secrets.token_urlsafe(32)
            self._servers = make_servers(
                config,
                range(config.count),
                key=self._key,
                model_dir=model_dir,
                dtype=dtype,
                log_dir=log_dir,
                seed=seed,
                first_gpu=first_gpu,
                trained=trained,
                adapter_rank=adapter_rank,
                tokenizer=tokenizer,
            )
        self._config = config
        self._sleeps = config.placement == "colocated"
        self._keep_cache = keep_cache
        self._stop_token_ids = tuple(stop_token_ids)
        self._report = report
        self._vocab_size = read_vocab_size(model_dir)
        self._routed = read_model_spec(model_dir) if config.routing_replay else None
        self._clients: list[Client] = []
        self._pools: list[ThreadPoolExecutor] = []
        self._sync: WeightSync | None = None
        self._version: WeightsVersion | None = None
        self._restarts = Restarts(config.max_restarts)
        self._restarts_told = 0
        self._counts = dict.fromkeys(FAULT_FIGURES, 0)
        self._lost: dict[int, Future[None] | None] = {}
        """Servers that wait for the next update, with the start of their replacement."""
        self._replaced: set[int] = set()
        self._revived = False
        self._replacing = ThreadPoolExecutor(1, thread_name_prefix="replace-server")
        # start() may run in another thread than stop(): without the lock a server could be started after all were stopped.
        self._spawning = threading.Lock()
        self._stopped = False
        self._published: list[WeightsVersion] = [INITIAL_WEIGHTS]
        self._common = 1
        """Number of ``_published`` versions from finished updates."""
        self.updating = False
        # A stream of samples may lose a server in one thread while another updates weights.
        self._changing = threading.RLock()

    # -- what a stream of samples asks of its fleet (``stream.Host``)

    def lanes(self) -> list[Lane]:
        if self._revived and self._version is None:
            return []
        parts = enumerate(zip(self._servers, self._clients, self._pools, strict=False))
        away = self._lost.keys() | self._replaced
        return [Lane(index, client, pool, server.healthy) for index, (server, client, pool) in parts if index not in away]

    def published(self) -> int:
        return self._common

    def versions(self, since: int) -> list[WeightsVersion]:
        return self._published[since - 1 :]

    def count_retried(self, requests: int) -> None:
        self._counts["requests/retried"] += requests

    @contextmanager
    def _announced(self, version: WeightsVersion) -> Iterator[None]:
        """During an update some servers may already draw with the new weights."""
        self._published.append(version)
        self.updating = True
        try:
            yield
            self._common = len(self._published)
            self._replaced, self._revived = set(), False
        except BaseException:
            self._published.pop()
            raise
        finally:
            self.updating = False

    def _end(self) -> None:
        self._version = None
        self._close_sync()
        for_all_at_once(self._servers, lambda server: server.stop())
        self._disconnect()

    def lose(self, lane: Lane, cause: ServerFault) -> None:
        """Raises ServerDied if no other server samples, or if servers must start together."""
        with self._changing:
            # Skip a server that was replaced, or that another stream (an evaluation's) has lost.
            if lane.index not in self._lost and lane.client in self._clients:
                self._lose(lane, cause)

    def _lose(self, lane: Lane, cause: ServerFault) -> None:
        self._blame(cause)
        self._lost[lane.index] = None
        if self._sleeps or len(self._lost) == len(self._servers):
            if not isinstance(cause, ServerGone):  # one that only seemed dead is spared by revive()
                self._servers[lane.index].stop()
                self._clients[lane.index].close()
            raise self._died([self._servers[index] for index in self._lost], cause)
        self._report(f"{cause}; its requests go to the other servers, and it is started again")
        self._clients[lane.index].close()
        self._close_sync()
        self._lost[lane.index] = self._replacing.submit(self._restart, [self._servers[lane.index]], stop=True)

    def _blame(self, cause: Exception) -> None:
        self._restarts.blame(cause)
        if isinstance(cause, ServerSilent):
            self._counts["servers/timeouts"] += 1

    def figures(self) -> dict[str, float]:
        done = self._restarts.done
        counts = {"servers/restarts": done - self._restarts_told, **self._counts}
        self._restarts_told, self._counts = done, dict.fromkeys(FAULT_FIGURES, 0)
        return {name: float(count) for name, count in counts.items()}

    def _take_back(self) -> None:
        """Replaced servers have the weights of the model's folder."""
        if not self._lost:
            return
        # Before they leave ``_lost``: a stream in another thread looks at both, and must not ask a server without weights.
        self._replaced = {index for index, started in self._lost.items() if started is not None}
        replacements, self._lost = self._lost, {}
        try:
            for started in replacements.values():
                if started is not None:
                    started.result()
            for index, started in replacements.items():
                if started is not None:
                    self._version = None
                    self._connect_one(index)
        except BaseException:
            self._end()
            raise

    def _restart(self, servers: Sequence[Server | ExternalServer], *, stop: bool = False) -> None:
        """May run in a thread."""
        if stop:
            for_all_at_once(servers, lambda server: server.stop())
        while servers:
            self._restarts.add(len(servers), "\n".join(server.log_end() for server in servers))
            try:
                self._launch(servers)
                return
            except RuntimeError as error:
                if self._stopped:
                    raise
                self._restarts.blame(error)
                servers = [server for server in servers if not server.healthy()]
                for server in servers:
                    server.stop()

    def _start(self, servers: Sequence[Server | ExternalServer]) -> None:
        try:
            self._launch(servers)
            self._connect()
        except BaseException:
            self._end()
            raise

    def _launch(self, servers: Sequence[Server | ExternalServer]) -> None:
        with self._spawning:
            if self._stopped:
                raise RuntimeError("the rollout servers were stopped; make a new Fleet to start them again")
            taken = {server.port for server in self._servers if server.alive}
            for server in servers:
                server.start(taken)
                taken.add(server.port)
        for_all_at_once(servers, lambda server: server.wait_ready())

    def _connect(self) -> None:
        self._disconnect()
        self._replaced = set()
        self._clients = [self._client(server) for server in self._servers]
        self._pools = [self._pool() for _ in self._servers]
        if self._sleeps:
            for_all_at_once(self._clients, Client.sleep)

    def _connect_one(self, index: int) -> None:
        self._pools[index].shutdown(wait=False, cancel_futures=True)
        self._pools[index] = self._pool()
        self._clients[index] = self._client(self._servers[index])

    def _client(self, server: Server | ExternalServer) -> Client:
        timeout_s, apart = self._config.request_timeout_s, self._keep_cache
        return Client(server.url, self._key, timeout_s, self._vocab_size, self._routed, versions_apart=apart)

    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(connections(self._config), thread_name_prefix="rollout")

    def _disconnect(self) -> None:
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for client in self._clients:
            client.close()
        self._clients, self._pools = [], []

    def raise_if_dead(self, cause: Exception) -> None:
        if isinstance(cause, ServerDied):
            return
        away = self._lost.keys() | self._replaced
        dead = [server for index, server in enumerate(self._servers) if index not in away and not server.healthy()]
        if dead:
            self._restarts.blame(cause)
            raise self._died(dead, cause) from cause

    def _died(self, dead: Sequence[Server | ExternalServer], cause: Exception) -> ServerDied:
        logs = "\n".join(server.log_end() for server in dead)
        return ServerDied(f"rollout server gone: {', '.join(server.url for server in dead)} ({cause}).\n{logs}")

    def _close_sync(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None
