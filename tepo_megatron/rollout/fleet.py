"""All rollout servers of a run as one sampler: prompts in, groups of responses out, weights updated, the dead restarted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from torch import Tensor

from tepo_megatron.bridge.transfer.broadcast import Manifest
from tepo_megatron.bridge.transfer.sender import ShardSender
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.rollout.answers import read_vocab_size
from tepo_megatron.rollout.client import INITIAL_WEIGHTS, Client
from tepo_megatron.rollout.dispatch import Dispatcher, Lane
from tepo_megatron.rollout.external import ExternalServer
from tepo_megatron.rollout.faults import ServerFault, ServerGone, ServerSilent
from tepo_megatron.rollout.limits import connections
from tepo_megatron.rollout.requests import Request, prompt_seed, split_groups
from tepo_megatron.rollout.restarts import Restarts
from tepo_megatron.rollout.server import Server, for_all_at_once
from tepo_megatron.rollout.servers import make_servers
from tepo_megatron.rollout.sync import BroadcastSync, ShardSync, WeightSync
from tepo_megatron.types import Response, WeightsVersion

S = TypeVar("S", bound=WeightSync)

FIGURES = ("servers/timeouts", "requests/retried")
"""What a fleet counts beside its restarts."""

NO_SERVERS = dict.fromkeys(("servers/restarts", *FIGURES), 0.0)
"""The figures of a run without servers."""


class ServerDied(RuntimeError):  # noqa: N818
    """A rollout server is gone. ``Fleet.revive`` starts it again, with stale weights."""


class Fleet:
    """``config.count`` vLLM servers of one model. Used by one process, the trainer's rank 0, from one thread.

    They are processes of this machine, on GPUs from ``first_gpu`` on; or with ``config.placement = "external"`` those that
    ``tepo serve`` runs: then starting waits for them, stopping leaves them, and reviving has their nodes replace them. With
    ``"colocated"`` they share the trainer's GPUs: they sleep after starting, reviving and :meth:`sleep`, and after an update
    until :meth:`wake_up`.

    ``dtype`` is that of the weights unless the config has its own; ``stop_token_ids`` end a response, and are its last id when
    they do; ``log_dir`` gets a ``server-N.log`` of each; the weights in ``model_dir`` are version 0; ``report`` gets a sentence
    for every fault that the fleet mends by itself. A context manager: entering starts the servers, leaving stops them.
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
    ) -> None:
        self._stop_token_ids = tuple(stop_token_ids)
        config, self._key, self._servers = make_servers(
            config, model_dir=model_dir, dtype=dtype, log_dir=log_dir, seed=seed, first_gpu=first_gpu
        )
        self._config = config
        self._sleeps = config.placement == "colocated"
        self._report = report
        self._vocab_size = read_vocab_size(model_dir)
        self._clients: list[Client] = []
        self._pools: list[ThreadPoolExecutor] = []
        self._sync: WeightSync | None = None
        self._version: WeightsVersion | None = None
        self._restarts = Restarts(config.max_restarts)
        self._restarts_told = 0
        self._counts = dict.fromkeys(FIGURES, 0)
        self._lost: dict[int, Future[None] | None] = {}
        """Servers that sample no more until the next update, by number; with the start of what replaces them, if that runs."""
        self._replacing = ThreadPoolExecutor(1, thread_name_prefix="replace-server")
        # start() may run in another thread than stop(): without the lock a server could be started after all were stopped.
        self._spawning = threading.Lock()
        self._stopped = False

    @property
    def weights_version(self) -> WeightsVersion | None:
        """The version that every server has; None before the start, and after a restart or a failed update until the next."""
        return self._version

    def start(self) -> None:
        """Start all servers side by side and return when all answer.

        May run in another thread than the rest; a stop() meanwhile ends it. Raises RuntimeError with the end of a server's log,
        after stopping all, if one does not come up.
        """
        self._start(self._servers)
        self._version = None if self._sleeps else INITIAL_WEIGHTS

    def stop(self) -> None:
        """End all processes of all servers, within seconds, for good; does nothing if there are none."""
        with self._spawning:
            self._stopped = True
        self._replacing.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _end(self) -> None:
        self._version = None
        self._close_sync()
        for_all_at_once(self._servers, lambda server: server.stop())
        self._disconnect()

    def __enter__(self) -> Fleet:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        temperature: float,
        max_new_tokens: int,
        seed: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Response]]:
        """Draw ``n`` responses to each prompt (token ids, at least one); the groups are in the order of the prompts.

        ``temperature`` 0 decodes greedily, and needs n = 1. Samples, of one prompt or of several, are independent draws; the
        same ``seed`` gives the same draws from the same weights, up to the numerics of batching. ``on_progress`` is called in
        this thread with (prompts done, all prompts). Raises ServerDied when a server is gone, ValueError for an empty prompt,
        RuntimeError for whatever else a server answers.
        """
        if not self._pools or self._version is None:
            raise RuntimeError(
                "the servers do not have the current weights; start the fleet, and after a revive() update their weights"
            )
        if temperature == 0 and n != 1:
            raise ValueError(f"greedy decoding gives one response per prompt, but n = {n}; use n = 1 or a temperature above 0")
        if empty := [index for index, prompt in enumerate(prompts) if not prompt]:
            raise ValueError(f"prompt {empty[0]} is empty; a prompt needs at least one token")
        version = self._version

        def ask(client: Client, wanted: Request) -> list[Response]:
            return client.generate(
                prompts[wanted.prompt],
                n=wanted.n,
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                # vLLM draws sample j of a request with its seed + j, so a group that is split has the draws of one that is not
                seed=None if temperature == 0 else prompt_seed(seed, wanted.prompt) + wanted.first,
                stop_token_ids=self._stop_token_ids,
                version=version,
            )

        groups: list[list[Response | None]] = [[None] * n for _ in prompts]
        done = 0
        dispatcher = self._dispatcher(ask)
        try:
            for wanted, responses in dispatcher.run(split_groups(len(prompts), n, self._config.max_num_seqs)):
                group = groups[wanted.prompt]
                group[wanted.first : wanted.first + wanted.n] = responses
                if None not in group:
                    done += 1
                    if on_progress is not None:
                        on_progress(done, len(prompts))
        except RuntimeError as error:
            self._raise_if_dead(error)
            raise
        finally:
            self._counts["requests/retried"] += dispatcher.retried
        return [[response for response in group if response is not None] for group in groups]

    def _dispatcher(self, ask: Callable[[Client, Request], list[Response]]) -> Dispatcher[Request, list[Response]]:
        lanes = [
            Lane(index, client, pool, server.healthy)
            for index, (server, client, pool) in enumerate(zip(self._servers, self._clients, self._pools, strict=True))
            if index not in self._lost
        ]
        config = self._config
        return Dispatcher(lanes, ask, self._lose, config.request_timeout_s, config.max_retries)

    def _lose(self, lane: Lane, cause: ServerFault) -> None:
        """End a server that is dead, hangs or answers wrongly, and start what replaces it, which gets weights with the next
        update. Raises ServerDied where no other server samples, or servers share the trainer's GPUs and start together.
        """
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
        """Since the last call: restarts of servers, servers that were given up because they hung, requests asked again."""
        done = self._restarts.done
        counts = {"servers/restarts": done - self._restarts_told, **self._counts}
        self._restarts_told, self._counts = done, dict.fromkeys(FIGURES, 0)
        return {name: float(count) for name, count in counts.items()}

    def prompt_logprobs(self, prompt: Sequence[int]) -> dict[str, list[float]]:
        """Address → log-probs of the tokens of a prompt but the first, under temperature 1. Raises as :meth:`generate`."""
        found: dict[str, list[float]] = {}
        self._on_all(lambda client: found.update({client.url: self._ask_again(client, prompt)}))
        return found

    def _ask_again(self, client: Client, prompt: Sequence[int]) -> list[float]:
        """The log-probs of a prompt, asked for again where an answer cannot be right."""
        faults = 0
        while True:
            try:
                return client.prompt_logprobs(prompt)
            except (ServerSilent, ServerGone):
                raise
            except ServerFault as error:
                faults += 1
                self._blame(error)
                if faults > self._config.max_retries:
                    raise ServerGone(str(error), url=error.url) from error
                self._counts["requests/retried"] += 1

    def sleep(self) -> None:
        """Colocated servers give the trainer's GPUs up, with their weights; others do nothing. ServerDied as ever."""
        if self._sleeps:
            self._version = None
            self._on_all(Client.sleep)

    def wake_up(self) -> None:
        """After an update: colocated servers take memory for their caches, and sample again; others do nothing."""
        if self._sleeps:
            self._on_all(lambda client: client.wake_up("kv_cache"))

    def _on_all(self, request: Callable[[Client], None]) -> None:
        try:
            for_all_at_once(self._clients, request)
        except RuntimeError as error:
            if isinstance(error, ServerSilent | ServerGone):  # its processes may live, but it must not go on as it is
                self._blame(error)
                for server in self._servers:
                    if server.url == error.url:
                        server.stop()
            self._raise_if_dead(error)
            raise

    def update_weights_from_tensors(self, version: WeightsVersion, manifest: Manifest, tensors: Iterable[Tensor]) -> None:
        """Put full tensors into all servers, from this process; ``version`` is stamped on every later response.

        ``manifest`` announces (Hugging Face name, full shape, dtype name) of each of ``tensors``, in order. After an error the
        servers are stopped, since their weights are undefined, and the rest of ``tensors`` is consumed, so that ranks that
        gather them together stay in step. Raises ServerDied if a server's death was the cause (revive() and repeat), otherwise
        RuntimeError naming the server and the tensor, or ValueError where tensors do not match the manifest.
        """
        stream = iter(tensors)
        try:
            self._update(version, BroadcastSync, lambda sync: sync.update_weights(version, manifest, stream))
        except (RuntimeError, ValueError):
            for _ in stream:  # each tensor is a collective of the trainer's ranks
                continue
            raise

    def update_weights_from_shards(self, version: WeightsVersion, sender: ShardSender) -> None:
        """Put the trainer's shards into all servers, straight from the ranks that hold them; the other ranks call
        ``sender.update_as_non_root``.

        As :meth:`update_weights_from_tensors`, and RuntimeError where weights did not arrive as they were sent, with tensors
        and ranks. The error says which of the other ranks failed first, and why.
        """
        try:
            self._update(version, ShardSync, lambda sync: sync.update_weights(version, sender))
        except RuntimeError as error:
            if failed := sender.finish_update(arrived=False):
                raise type(error)(f"{error}. {failed}") from error
            raise
        sender.finish_update(arrived=True)

    def _update(self, version: WeightsVersion, kind: type[S], update: Callable[[S], None]) -> None:
        if not self._clients:
            raise RuntimeError("the fleet is not started; call start() first")
        self._take_back()
        if not isinstance(self._sync, kind):
            self._close_sync()
            self._sync = kind(
                self._clients,
                host=self._config.host,
                tp=self._config.tp,
                timeout_s=self._config.transfer_timeout_s,
                answer_timeout_s=self._config.request_timeout_s,
                asleep=self._sleeps,
            )
        self._version = None
        try:
            update(self._sync)
            self._version = version
        except (RuntimeError, ValueError) as error:
            died = isinstance(error, ServerSilent) or any(not server.healthy() for server in self._servers)
            if died:
                self._blame(error)
            message = f"weights {version.step} did not reach the rollout servers: {error}"
            raise (ServerDied if died else type(error))(message) from error
        finally:
            if self._version is None:  # some servers may have the new weights, others half of them
                self._end()

    def _close_sync(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    def revive(self) -> bool:
        """Start the servers that are gone again; True if there were any: the weights must then be updated again.

        Colocated servers sleep afterwards in any case, and so need the weights. Raises RuntimeError when there would be more
        than ``config.max_restarts`` restarts in this run; ServerDied as :meth:`sleep`.
        """
        self._take_back()
        gone = [server for server in self._servers if not server.healthy()]
        if not gone:
            self.sleep()
            return False
        self._version = None
        self._close_sync()
        try:
            self._restart(gone)
            self._connect()
        except BaseException:
            self._end()
            raise
        return True

    def _take_back(self) -> None:
        """Wait for servers that are being replaced; they have the weights of the model's folder."""
        if not self._lost:
            return
        replacements, self._lost = self._lost, {}
        try:
            for started in replacements.values():
                if started is not None:
                    started.result()
            if any(started is not None for started in replacements.values()):
                self._version = None
                self._connect()
        except BaseException:
            self._end()
            raise

    def _restart(self, servers: Sequence[Server | ExternalServer], *, stop: bool = False) -> None:
        """Start servers again until they answer. May run in a thread. Raises RuntimeError when there are too many restarts."""
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
        config = self._config
        self._clients = [Client(server.url, self._key, config.request_timeout_s, self._vocab_size) for server in self._servers]
        self._pools = [ThreadPoolExecutor(connections(config), thread_name_prefix="rollout") for _ in self._servers]
        if self._sleeps:
            for_all_at_once(self._clients, Client.sleep)

    def _disconnect(self) -> None:
        """Requests that other threads wait for fail."""
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for client in self._clients:
            client.close()
        self._clients, self._pools = [], []

    def _raise_if_dead(self, cause: Exception) -> None:
        if isinstance(cause, ServerDied):
            return
        dead = [server for index, server in enumerate(self._servers) if index not in self._lost and not server.healthy()]
        if dead:
            self._restarts.blame(cause)
            raise self._died(dead, cause) from cause

    def _died(self, dead: Sequence[Server | ExternalServer], cause: Exception) -> ServerDied:
        logs = "\n".join(server.log_end() for server in dead)
        return ServerDied(f"rollout server gone: {', '.join(server.url for server in dead)} ({cause}).\n{logs}")
