from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor

from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.sampler.fleet.server_pool import Roster
from tepo_megatron.sampler.fleet.stream import FleetStream
from tepo_megatron.sampler.fleet.sync import BroadcastSync, ShardSync, WeightSync
from tepo_megatron.sampler.protocol import INITIAL_WEIGHTS, SamplerSpec, ServerDied
from tepo_megatron.sampler.sampling import Sampling, SamplingSettings, prompt_seed
from tepo_megatron.sampler.vllm.client import Client, ServerFault, ServerGone, ServerSilent
from tepo_megatron.sampler.vllm.resources import check_machine_serves, check_server_split, cores_of, worker_cores
from tepo_megatron.sampler.vllm.server import for_all_at_once
from tepo_megatron.weights.transfer.full_tensors import TensorManifest
from tepo_megatron.weights.transfer.sender import ShardSender

S = TypeVar("S", bound=WeightSync)
T = TypeVar("T")


class Fleet(Roster):
    """A ``Sampler`` of ``config.count`` vLLM servers.

    With ``"external"`` placement it leaves them running; ``"colocated"`` ones sleep after starting, reviving and an update,
    until :meth:`wake_up`.
    """

    @property
    def weights_version(self) -> WeightsVersion | None:
        return self._version

    @property
    def addresses(self) -> list[str]:
        return [server.url for server in self._servers if server.port]

    def start(self) -> None:
        self._start(self._servers)
        self._version = None if self._sleeps or self._starts_empty else INITIAL_WEIGHTS

    def stop(self) -> None:
        with self._spawning:
            self._stopped = True
        self._replacing.shutdown(wait=False, cancel_futures=True)
        self._end()

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
        top_p: float = 1.0,
        top_k: int | None = None,
        min_p: float = 0.0,
        stop: tuple[str, ...] = (),
        bad_words: tuple[str, ...] = (),
        numbers: Sequence[int] | None = None,
        on_group: Callable[[int, list[Response]], None] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        on_move: Callable[[], None] = lambda: None,
    ) -> list[list[Response]]:
        if empty := [index for index, prompt in enumerate(prompts) if not prompt]:
            raise ValueError(f"prompt {empty[0]} is empty; a prompt needs at least one token")
        groups: list[list[Response | None]] = [[None] * n for _ in prompts]
        done = 0
        sampling = Sampling(temperature, max_new_tokens, (), top_p, top_k, min_p, stop, bad_words)
        with self.sample_stream(sampling, on_move=on_move) as stream:
            for index, prompt in enumerate(prompts):
                stream.submit(index, prompt, prompt_seed(seed, index if numbers is None else numbers[index]), n)
            for index, sample, response in stream:
                groups[index][sample] = response
                complete = [response for response in groups[index] if response is not None]
                if len(complete) == n:
                    done += 1
                    if on_group is not None:
                        on_group(index, complete)
                    if on_progress is not None:
                        on_progress(done, len(prompts))
        return [[response for response in group if response is not None] for group in groups]

    def sample_stream(
        self, sampling: SamplingSettings, *, sampling_mask: bool = False, on_move: Callable[[], None] = lambda: None
    ) -> FleetStream:
        if not self._pools or (self._version is None and not self.updating):
            raise RuntimeError(
                "the servers do not have the current weights; start the fleet, and after a revive() update their weights"
            )
        config = self._config
        settings = Sampling.of(sampling, self._stop_token_ids, sampling_mask=sampling_mask)
        return FleetStream(self, settings, config.request_timeout_s, config.max_retries, config.max_num_seqs, on_move)

    def prompt_logprobs(self, prompt: Sequence[int]) -> dict[str, list[float]]:
        scores: dict[str, list[float]] = {}
        self._on_all(lambda client: scores.update({client.url: self._retry(lambda: client.prompt_logprobs(prompt))}))
        return scores

    def cached_logprobs(self, prompt: Sequence[int], n: int) -> dict[str, tuple[list[float], list[float]]]:
        version = self._version
        if version is None:
            raise RuntimeError("the servers do not have the current weights; update their weights first")
        scores: dict[str, tuple[list[float], list[float]]] = {}
        self._on_all(
            lambda client: scores.update({client.url: self._retry(lambda: client.cached_logprobs(prompt, n, version))})
        )
        return scores

    def _retry(self, ask: Callable[[], T]) -> T:
        faults = 0
        while True:
            try:
                return ask()
            except (ServerSilent, ServerGone):
                raise
            except ServerFault as error:
                faults += 1
                self._blame(error)
                if faults > self._config.max_retries:
                    raise ServerGone(str(error), url=error.url) from error
                self._counts["requests/retried"] += 1

    def sleep(self) -> None:
        if self._sleeps:
            self._version = None
            self._on_all(Client.sleep)

    def wake_up(self) -> None:
        if self._sleeps:
            self._on_all(lambda client: client.wake_up("kv_cache"))

    def _on_all(self, request: Callable[[Client], None]) -> None:
        try:
            for_all_at_once(self._clients, request)
        except RuntimeError as error:
            if isinstance(error, ServerSilent | ServerGone):  # its processes may live, but it must not continue
                self._blame(error)
                for server in self._servers:
                    if server.url == error.url:
                        server.stop()
            self.raise_if_dead(error)
            raise

    def update_weights_from_tensors(self, version: WeightsVersion, manifest: TensorManifest, tensors: Iterable[Tensor]) -> None:
        self.update_adapters(version, manifest, tensors, None)

    def update_adapters(
        self, version: WeightsVersion, manifest: TensorManifest, tensors: Iterable[Tensor], settings: Mapping[str, Any] | None
    ) -> None:
        """Without ``settings`` the tensors are the full weights."""
        stream = iter(tensors)
        try:
            self._update(version, BroadcastSync, lambda sync: sync.update_weights(version, manifest, stream, settings))
        except (RuntimeError, ValueError):
            for _ in stream:  # each tensor is a collective of the trainer's ranks
                continue
            raise

    def update_weights_from_shards(self, version: WeightsVersion, sender: ShardSender) -> None:
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
        with self._changing, self._announced(version):
            self._take_back()
            self._update_all(version, kind, update)

    def _update_all(self, version: WeightsVersion, kind: type[S], update: Callable[[S], None]) -> None:
        if not isinstance(self._sync, kind):
            self._close_sync()
            self._sync = kind(
                self._clients,
                host=self._config.host,
                tp=self._config.tp,
                timeout_s=self._config.transfer_timeout_s,
                answer_timeout_s=self._config.request_timeout_s,
                asleep=self._sleeps,
                keep_cache=self._keep_cache,
            )
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
                self.sleep()
                return False
            self._version, self._revived = None, True
            self._close_sync()
            try:
                self._restart(gone)
                self._connect()
            except BaseException:
                self._end()
                raise
            return True


SAMPLER = SamplerSpec(
    make=Fleet,
    check_model=check_server_split,
    check_machine=check_machine_serves,
    cores=lambda config, available: cores_of(worker_cores(config, config.count), available),
)
