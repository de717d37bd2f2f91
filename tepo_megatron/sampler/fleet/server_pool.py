"""The servers of a fleet: started, watched and restarted; and their clients."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tepo_megatron.config.rollout_server import ServerConfig
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.sampler.fleet.external import ExternalServer, external_servers
from tepo_megatron.sampler.fleet.stream import Lane
from tepo_megatron.sampler.fleet.sync import WeightSync
from tepo_megatron.sampler.protocol import FAULT_FIGURES, INITIAL_WEIGHTS, ServerDied
from tepo_megatron.sampler.vllm.client.client import Client
from tepo_megatron.sampler.vllm.client.connection import ServerFault, ServerGone, ServerSilent
from tepo_megatron.sampler.vllm.server.checks import read_vocab_size
from tepo_megatron.sampler.vllm.server.resources import (
    check_machine,
    connections,
    raise_open_files,
    server_seed,
    weights_bytes,
    worker_cores,
)
from tepo_megatron.sampler.vllm.server.server import Server, for_all_at_once, has_gpu
from tepo_megatron.weights.architecture import read_model_spec


@dataclass
class Restarts:
    """Counts the restarts of a run, at most ``most``."""

    most: int
    done: int = 0
    first_cause: str = ""

    def blame(self, cause: object) -> None:
        """Keeps the first cause, since later ones may be consequences."""
        self.first_cause = self.first_cause or str(cause).partition("\n")[0]

    def add(self, count: int, logs: str) -> None:
        """Call it before the restarts. Raises RuntimeError, with the end of the logs, if they are too many."""
        if self.done + count > self.most:
            first = f" The first failure was: {self.first_cause}." if self.first_cause else ""
            raise RuntimeError(
                f"rollout servers died {self.done + count} times; rollout.server.max_restarts = {self.most}.{first}\n{logs}"
            )
        self.done += count


class Roster:
    """The part of a ``Fleet`` below sampling and updates.

    All servers but those in ``_lost`` have the weights ``_version``.
    """

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
        config, self._key, self._servers = make_servers(
            config,
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
        """Servers that do not sample until the next update, by number; with the start of their replacement."""
        self._replaced: set[int] = set()
        """Servers that were replaced and get their first weights from the running update."""
        self._revived = False
        """Whether all servers wait for the next update, since some were restarted."""
        self._replacing = ThreadPoolExecutor(1, thread_name_prefix="replace-server")
        # start() may run in another thread than stop(): without the lock a server could be started after all were stopped.
        self._spawning = threading.Lock()
        self._stopped = False
        self._published: list[WeightsVersion] = [INITIAL_WEIGHTS]
        self._common = 1
        """How many of ``_published`` come from finished updates."""
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
        """The replacement gets weights with the next update. Raises ServerDied if no other server samples, or if servers must
        start together, on the trainer's GPUs.
        """
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
        """May run in a thread. Raises RuntimeError after too many restarts."""
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


def make_servers(
    config: ServerConfig,
    *,
    model_dir: Path,
    dtype: str,
    log_dir: Path,
    seed: int,
    first_gpu: int,
    trained: bool = False,
    adapter_rank: int | None = None,
    tokenizer: bool = False,
) -> tuple[ServerConfig, str, Sequence[Server | ExternalServer]]:
    """Returns the config with the servers' address, their key, and the servers, not started yet.

    Servers of this machine take ``config.tp`` GPUs each, from ``first_gpu`` on. Raises ValueError if it has too few resources
    left.
    """
    if config.placement == "external":
        return external_servers(config, log_dir)
    raise_open_files()
    check_machine(config, config.count, weights_bytes=weights_bytes(model_dir), on_gpu=has_gpu())
    key = secrets.token_urlsafe(32)
    servers = [
        Server(
            config,
            model_dir=model_dir,
            dtype=config.served_dtype(dtype),
            cores=cores,
            key=key,
            log=log_dir / f"server-{index}.log",
            seed=server_seed(seed, index),
            gpus=range(first_gpu + index * config.tp, first_gpu + (index + 1) * config.tp),
            dummy=adapter_rank is None and config.starts_with_dummies(trained=trained),
            adapter_rank=adapter_rank,
            tokenizer=tokenizer,
        )
        for index, cores in enumerate(worker_cores(config, config.count))
    ]
    return config, key, servers
