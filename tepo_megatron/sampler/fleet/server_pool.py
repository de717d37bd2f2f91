import resource
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.runtime.machine import Machine, this_machine
from tepo_megatron.runtime.preemption import StopSignals
from tepo_megatron.sampler.fleet.external import ExternalServer, registry_for_ranks, shared_key, with_local_address
from tepo_megatron.sampler.fleet.sync import WeightSync
from tepo_megatron.sampler.protocol import INITIAL_WEIGHTS, NO_SERVERS, SamplerOptions, ServerDied
from tepo_megatron.sampler.vllm.client import Client, ServerFault, ServerGone, ServerSilent
from tepo_megatron.sampler.vllm.resources import read_vocab_size
from tepo_megatron.sampler.vllm.server import Server
from tepo_megatron.weights.architecture import read_model_spec

T = TypeVar("T")
_OTHER_FILES = 200  # of rank 0, besides its connections
_MOST_THREADS = 2**14  # a thread takes two memory mappings, and Linux gives a process 65,530


class ServerPool:
    """All servers but those in ``_lost`` have the weights ``_version``."""

    def __init__(self, config: ServerConfig, **options: Unpack[SamplerOptions]) -> None:
        Machine.raise_open_files()
        model_dir = options["model_dir"]
        has_dummies = config.starts_with_dummies(trained=options.get("trained", False))
        self._starts_empty = has_dummies or options.get("adapter_rank") is not None
        self._servers: Sequence[Server | ExternalServer]
        registry = None if options.get("with_ranks") else registry_for_ranks()
        if config.placement == "external":
            config, registry = with_local_address(config), config.registry
        if registry is not None:
            self._key = shared_key(registry)
            logs = [options["log_dir"] / f"server-{index}.log" for index in range(config.count)]
            place: dict[str, Any] = {"registry": registry, "key": self._key, "frozen": options.get("with_ranks", False)}
            place["model"] = None if options.get("trained") else model_dir
            self._servers = [ExternalServer(config, index=index, log=log, **place) for index, log in enumerate(logs)]
        else:
            self._key = secrets.token_urlsafe(32)
            self._servers = Server.make_all(config, range(config.count), key=self._key, **options)
        self.config = config
        self._keep_cache = options.get("keep_cache", False)
        self._stop_token_ids = tuple(options["stop_token_ids"])
        self._report = options.get("report", lambda sentence: None)
        self._reported: set[str] = set()
        self._vocab_size = read_vocab_size(model_dir)
        self._routed = read_model_spec(model_dir) if config.routing_replay else None
        self._clients: list[Client] = []
        self._sync: WeightSync | None = None
        self._version: WeightsVersion | None = None
        self._deaths = 0
        self._first_cause = ""  # later ones may be consequences
        self._counts = dict(NO_SERVERS)
        self._lost: dict[int, Future[None] | None] = {}
        """Servers that wait for the next update, with their replacement's start."""
        self._replaced: set[int] = set()
        self._revived = False
        self._replacing = ThreadPoolExecutor(1, thread_name_prefix="replace-server")
        # start() may run in another thread than stop(): without the lock a server could be started after all were stopped.
        self._spawning = threading.Lock()
        self._stopped = False
        self._versions: list[WeightsVersion] = [INITIAL_WEIGHTS]
        self.published = 1  # counts versions that all servers have had
        self.updating = False
        # A stream of samples may lose a server in one thread while another updates weights.
        self._changing = threading.RLock()
        self._counting, self._scoring = threading.Lock(), Counter[int]()  # responses that a server scores

    @property
    def _sleeps(self) -> bool:
        return self.config.placement == "colocated"

    @property
    def _starts_right(self) -> bool:
        """Until the first update, the model's folder has the right weights."""
        return bool(self._clients) and not self._starts_empty and self.published == 1 and not self.updating

    @property
    def _away(self) -> set[int]:
        return self._lost.keys() | self._replaced

    def sampling(self) -> dict[int, Client]:
        if self._revived and self._version is None:
            return {}
        return {index: client for index, client in enumerate(self._clients) if index not in self._away}

    def is_healthy(self, index: int) -> bool:
        return self._servers[index].healthy()

    def versions(self, since: int) -> list[WeightsVersion]:
        """Returns the versions that may draw tokens: number ``since``, from 1, and later ones."""
        return self._versions[since - 1 :]

    def count_retried(self, requests: int) -> None:
        self._counts["requests/retried"] += requests

    @contextmanager
    def _announced(self, version: WeightsVersion) -> Iterator[None]:
        """Some servers may draw with the new weights during an update."""
        self.updating = True
        self._versions.append(version)
        try:
            yield
            self.published = len(self._versions)
            self._replaced, self._revived = set(), False
        except BaseException:
            self._versions.pop()
            raise
        finally:
            self.updating = False

    @staticmethod
    def _for_all(servers: Sequence[T], action: Callable[[T], None], *, until: str = FIRST_EXCEPTION) -> None:
        """Raises the first error, by default without waiting for the others."""
        pool = ThreadPoolExecutor(len(servers), thread_name_prefix="server")
        try:
            requests = [pool.submit(action, server) for server in servers]
            for request in wait(requests, return_when=until).done:
                request.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _end(self) -> None:
        self._version = None
        self._close_sync()
        self._for_all(self._servers, lambda server: server.stop())
        self._disconnect()

    def lose(self, index: int, client: Client, cause: ServerFault) -> None:
        """Raises ServerDied if no other server samples, or if servers must start together."""
        with self._changing:
            # Skip a server that was replaced, or that another stream (an evaluation's) has lost.
            if index in self._lost or client not in self._clients:
                return
            self._blame(cause)
            self._lost[index] = None
            if self._sleeps or len(self._lost) == len(self._servers):
                if not isinstance(cause, ServerGone):  # one that only seemed dead is spared by revive()
                    self._servers[index].stop()
                    client.close()
                raise self._died([self._servers[index] for index in self._lost], cause)
            self._report(f"{cause}; its requests go to the other servers, and it is started again")
            client.close()
            self._close_sync()
            started = self._replacing.submit(self._restart, [self._servers[index]], 1)
            self._lost[index] = started
            # In a thread of its own: an update has the lock while it waits for other replacements.
            back = threading.Thread(target=self._bring_back, args=(index, started), name="bring-back-server", daemon=True)
            started.add_done_callback(lambda _: back.start())

    def _bring_back(self, index: int, started: Future[None]) -> None:
        with self._changing:
            # A start that failed is raised by the next update, or ends a stream without servers.
            is_up = not started.cancelled() and started.exception() is None
            clients = self._clients  # stop() waits for no lock, and leaves another list
            if is_up and self._starts_right and self._lost.get(index) is started:
                clients[index] = self._client(self._servers[index])
                del self._lost[index]

    def _remember(self, cause: Exception) -> None:
        self._first_cause = self._first_cause or str(cause).partition("\n")[0]

    def _blame(self, cause: Exception) -> None:
        self._remember(cause)
        if isinstance(cause, ServerSilent):
            self._counts["servers/timeouts"] += 1

    def report_once(self, sentence: str) -> None:
        if sentence not in self._reported:
            self._reported.add(sentence)
            self._report(sentence)

    def figures(self) -> dict[str, float]:
        counts, self._counts = self._counts, dict(NO_SERVERS)
        return counts

    def _take_back(self) -> None:
        """Replaced servers have the weights of the model's folder."""
        with self._changing:
            if not self._lost:
                return
            # Before they leave ``_lost``: a stream in another thread looks at both, and must not ask a server without weights.
            replacements = {index: started for index, started in self._lost.items() if started is not None}
            self._replaced, self._lost = set(replacements), {}
            try:
                for started in replacements.values():
                    while not wait([started], 1.0).done:
                        if StopSignals.current().requested is not None:
                            raise ServerDied("a stop signal came while a server was started again")
                    started.result()
                for index in replacements:
                    self._version = None
                    self._clients[index] = self._client(self._servers[index])
            except BaseException:
                self._end()
                raise

    def _restart(self, servers: Sequence[Server | ExternalServer], deaths: int) -> None:
        while servers:
            self._for_all(servers, lambda server: server.stop())
            self._deaths += deaths
            if self._deaths > self.config.max_restarts:
                first = f" The first failure was: {self._first_cause}." if self._first_cause else ""
                logs = "\n".join(server.log_end() for server in servers)
                raise RuntimeError(
                    f"rollout servers died {self._deaths} times; rollout.server.max_restarts = {self.config.max_restarts}."
                    f"{first}\n{logs}"
                )
            self._counts["servers/restarts"] += len(servers)
            try:
                self._launch(servers, until=ALL_COMPLETED)  # one that still loads is not restarted for another's failure
                return
            except (RuntimeError, OSError) as error:
                if self._stopped:
                    raise
                self._remember(error)
                servers = [server for server in servers if not server.healthy()]
                deaths = len(servers)

    def _launch(self, servers: Sequence[Server | ExternalServer], *, until: str = FIRST_EXCEPTION) -> None:
        with self._spawning:
            if self._stopped:
                raise RuntimeError("the rollout servers were stopped; make a new Fleet to start them again")
            taken = {server.port for server in self._servers if server.alive}
            for server in servers:
                server.start(taken)
                taken.add(server.port)
        self._for_all(servers, lambda server: server.wait_ready(), until=until)

    def _connect(self) -> None:
        self._disconnect()
        self._replaced = set()
        self._clients = [self._client(server) for server in self._servers]
        pairs = zip(self._clients, self._servers, strict=True)
        if used := [client for client, server in pairs if isinstance(server, ExternalServer) and server.was_used]:
            self._for_all(used, Client.forget)
        if self._sleeps:
            self._for_all(self._clients, Client.sleep)

    def _client(self, server: Server | ExternalServer) -> Client:
        # Open files and threads limit the number of connections.
        files = max(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES)
        spare = min(files, this_machine().processes // 2, _MOST_THREADS)
        threads = max(1, min(self.config.max_num_seqs, spare // self.config.count))
        settings = (self._key, self.config.request_timeout_s, self._vocab_size, self._routed)
        return Client(server.url, *settings, versions_apart=self._keep_cache, threads=threads)

    def _disconnect(self) -> None:
        for client in self._clients:
            client.close()
        self._clients = []

    def raise_if_dead(self, cause: Exception) -> None:
        """Raises ServerDied if a dead server is the reason for ``cause``."""
        if isinstance(cause, ServerDied):
            return
        dead = [server for index, server in enumerate(self._servers) if index not in self._away and not server.healthy()]
        if dead:
            self._remember(cause)
            raise self._died(dead, cause) from cause

    def _died(self, dead: Sequence[Server | ExternalServer], cause: Exception) -> ServerDied:
        logs = "\n".join(server.log_end() for server in dead)
        return ServerDied(f"rollout server gone: {', '.join(server.url for server in dead)} ({cause}).\n{logs}")

    def _close_sync(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None
