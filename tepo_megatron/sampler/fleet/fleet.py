from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.sampler.fleet.external import ExternalServer, servers_for_ranks
from tepo_megatron.sampler.fleet.server_pool import ServerPool
from tepo_megatron.sampler.fleet.stream import FleetStream
from tepo_megatron.sampler.fleet.sync import WeightSync
from tepo_megatron.sampler.protocol import INITIAL_WEIGHTS, CacheReading, ReadBack, Sampler, SamplerSpec, Scores, ServerDied
from tepo_megatron.sampler.sampling import Sampling, SamplingSettings
from tepo_megatron.sampler.vllm.client import Client, ProgressWatch, ServerFault, ServerGone, ServerSilent
from tepo_megatron.sampler.vllm.resources import CPU_HEAD_SIZES, check_quantization, cores_of_servers
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts import check_server_split
from tepo_megatron.weights.transfer.full_tensors import TensorManifest
from tepo_megatron.weights.transfer.sender import ShardSender

T = TypeVar("T")


class Fleet(ServerPool, Sampler):
    """By placement: ``"external"`` servers are left running; ``"colocated"`` ones sleep after start, revival and update, until
    ``wake_up``.
    """

    @property
    def weights_version(self) -> WeightsVersion | None:
        return self._version

    @property
    def addresses(self) -> list[str]:
        return [client.url for client in self._clients]

    def describe(self) -> list[str]:
        return [": ".join(filter(None, (client.url, client.facts))) for client in self._clients]

    def start(self) -> None:
        try:
            self._launch(self._servers)
            self._connect()
        except BaseException:
            self._end()
            raise
        used = any(isinstance(server, ExternalServer) and server.was_used for server in self._servers)
        self._version = None if self._sleeps or self._starts_empty or used else INITIAL_WEIGHTS

    def stop(self) -> None:
        with self._spawning:
            self._stopped = True
        self._replacing.shutdown(wait=False, cancel_futures=True)
        self._end()

    def sample_stream(
        self, sampling: SamplingSettings, *, sampling_mask: bool = False, on_move: Callable[[], None] = lambda: None
    ) -> FleetStream:
        if not self._clients or (self._version is None and not self.updating):
            had_weights = self.published > 1 and not (self._stopped or self._sleeps)  # another thread revives the servers
            raise (ServerDied if had_weights else RuntimeError)(
                "the servers do not have the current weights; start the fleet, and after a revive() update their weights"
            )
        return FleetStream(self, Sampling.of(sampling, self._stop_token_ids, sampling_mask=sampling_mask), on_move)

    def prompt_logprobs(self, prompt: Sequence[int]) -> dict[str, list[float]]:
        return self._ask_all(lambda client: client.prompt_logprobs(prompt))

    def score(self, tokens: Sequence[int], k: int = 0) -> Scores:
        for faults in count(1):
            clients = dict(enumerate(self._clients))
            with self._counting:
                index = min(clients.keys() - self._away, key=lambda index: self._scoring[index], default=None)
                if index is None:
                    raise ServerDied("no server is left to score responses")
                self._scoring[index] += 1
            client = clients[index]
            try:
                return client.score(tokens, k)
            except ServerFault as error:
                gone = isinstance(error, ServerSilent | ServerGone) or not self.is_healthy(index)
                if gone or faults > self.config.max_retries:
                    self.lose(index, client, error)
                else:
                    self._blame(error)
                self.count_retried(1)
            finally:
                with self._counting:
                    self._scoring[index] -= 1
        raise AssertionError("unreachable")

    def read_through_cache(self, prompt: Sequence[int], n: int) -> dict[str, CacheReading]:
        version = self._version
        if version is None:
            raise RuntimeError("the servers do not have the current weights; update their weights first")
        return self._ask_all(lambda client: client.read_through_cache(prompt, n, version))

    def read_back(self) -> dict[str, ReadBack]:
        return self._ask_all(Client.read_back)

    def _ask_all(self, question: Callable[[Client], T]) -> dict[str, T]:
        answers: dict[str, T] = {}

        def ask(client: Client) -> None:
            for faults in count(1):
                try:
                    answers[client.url] = self._watched(client, question)
                    return
                except (ServerSilent, ServerGone):
                    raise
                except ServerFault as error:
                    self._blame(error)
                    if faults > self.config.max_retries:
                        raise ServerGone(str(error)) from error
                    self.count_retried(1)

        self._on_all(ask)
        return answers

    def _watched(self, client: Client, question: Callable[[Client], T]) -> T:
        """A request may wait while its server makes tokens."""
        watch = ProgressWatch(client.progress, self.config.request_timeout_s)
        with ThreadPoolExecutor(1, thread_name_prefix="ask-server") as thread, closing(watch):
            answer = thread.submit(question, client)
            while not wait([answer], watch.interval_s).done:
                if why := watch.look():
                    client.close()
                    raise ServerSilent(f"{client.url}: {why}")
            return answer.result()

    def sleep(self) -> None:
        if self._sleeps:
            self._version = None
            self._on_all(Client.sleep)

    def wake_up(self) -> None:
        if self._sleeps:
            self._on_all(lambda client: client.wake_up("kv_cache"))

    def _on_all(self, request: Callable[[Client], None]) -> None:
        failed: dict[Exception, int] = {}

        def ask(index: int) -> None:
            try:
                request(self._clients[index])
            except RuntimeError as error:
                if index not in self._lost:  # a stream may lose it meanwhile, and closes its client
                    failed[error] = index
                    raise

        asked = [index for index in range(len(self._clients)) if index not in self._lost]
        if not asked:
            raise ServerDied("no server is left to ask")
        try:
            self._for_all(asked, ask)
        except RuntimeError as error:
            if isinstance(error, ServerSilent | ServerGone):  # its processes may live, but it must not continue
                self._blame(error)
                if failed[error] not in self._lost:
                    self._servers[failed[error]].stop()
            self.raise_if_dead(error)
            if failed.get(error) in self._away:  # a stream has lost it since
                raise ServerDied(str(error)) from error
            raise
        if self._lost.keys() >= {*asked}:
            raise ServerDied("no server is left to ask")

    def update_weights_from_tensors(self, version: WeightsVersion, manifest: TensorManifest, tensors: Iterable[Tensor]) -> None:
        self.update_adapters(version, manifest, tensors, None)

    def update_adapters(
        self, version: WeightsVersion, manifest: TensorManifest, tensors: Iterable[Tensor], settings: Mapping[str, Any] | None
    ) -> None:
        """Without ``settings`` the tensors are the full weights."""
        stream = iter(tensors)
        try:
            self._update(version, lambda sync: sync.update_from_tensors(version, manifest, stream, settings))
        except (RuntimeError, ValueError, OSError):
            for _ in stream:  # each tensor is a collective of the trainer's ranks
                continue
            raise

    def update_weights_from_shards(self, version: WeightsVersion, sender: ShardSender) -> None:
        try:
            self._update(version, lambda sync: sync.update_from_shards(version, sender))
        except (RuntimeError, OSError) as error:
            if failed := sender.finish_update(arrived=False):
                raise type(error)(f"{error}. {failed}") from error
            raise
        sender.finish_update(arrived=True)

    def _update(self, version: WeightsVersion, update: Callable[[WeightSync], None]) -> None:
        if not self._clients:
            raise RuntimeError("the fleet is not started; call start() first")
        with self._changing, self._announced(version):
            self._take_back()
            if self._sync is None:
                self._sync = WeightSync(self._clients, self.config)
            # After a rollback the cache has keys and values of undone weights, and of these from before.
            self._sync.keep_cache = self._keep_cache and version.step > self._versions[-2].step
            self._version = None
            try:
                update(self._sync)
                self._version = version
            except (RuntimeError, ValueError) as error:
                # Also a server's fault outside the transfer: an engine without its worker first refuses a pause, then dies.
                died = isinstance(error, ServerFault) or any(not server.healthy() for server in self._servers)
                if died:
                    self._blame(error)
                message = f"weights {version.step} did not reach the rollout servers: {error}"
                raise (ServerDied if died else type(error))(message) from error
            finally:
                if self._version is None:  # some servers may have the new weights, others half of them
                    self._end()

    def revive(self) -> bool:
        with self._changing:
            self._take_back()
            gone = [server for server in self._servers if not server.healthy()]
            if not gone:
                if self._starts_right:
                    self._replaced = set()
                self.sleep()
                return False
            deaths = len(gone) if self._clients else 1  # after a failed update all were ended
            self._version, self._revived = None, True
            self._close_sync()
            try:
                self._restart(gone, deaths)
                self._connect()
            except BaseException:
                self._end()
                raise
            return True


def _check_model(config: ServerConfig, spec: ModelSpec) -> None:
    check_server_split(spec, config.tp, "rollout.server", config.quantization, config.transfer)


def _check_machine(config: ServerConfig, spec: ModelSpec) -> None:
    check_quantization(config.quantization)
    if torch.cuda.device_count() == 0 and spec.head_dim not in CPU_HEAD_SIZES:
        raise ValueError(
            f"the model's attention heads have {spec.head_dim} dimensions (head_dim, or hidden_size / num_attention_heads, in "
            f"config.json); on a CPU vLLM takes {', '.join(map(str, CPU_HEAD_SIZES))}. Give a model with such heads"
        )


SAMPLER = SamplerSpec(Fleet, _check_model, _check_machine, cores_of_servers, servers_for_ranks)
