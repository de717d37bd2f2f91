"""All rollout servers of a run as one sampler: prompts in, groups of responses out, weights updated, the dead restarted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor

from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.sampler.fleet.server_pool import Roster
from tepo_megatron.sampler.fleet.stream import FleetStream
from tepo_megatron.sampler.fleet.sync import AdapterSync, BroadcastSync, ShardSync, WeightSync
from tepo_megatron.sampler.protocol import INITIAL_WEIGHTS, SamplerSpec, ServerDied
from tepo_megatron.sampler.sampling import Sampling, SamplingSettings, prompt_seed
from tepo_megatron.sampler.vllm.client.client import Client
from tepo_megatron.sampler.vllm.client.connection import ServerFault, ServerGone, ServerSilent
from tepo_megatron.sampler.vllm.server.checks import check_machine_serves, check_server_split
from tepo_megatron.sampler.vllm.server.resources import cores_of, worker_cores
from tepo_megatron.sampler.vllm.server.server import for_all_at_once
from tepo_megatron.weights.transfer.full_tensors import TensorManifest
from tepo_megatron.weights.transfer.sender import ShardSender

S = TypeVar("S", bound=WeightSync)
T = TypeVar("T")


class Fleet(Roster):
    """``config.count`` vLLM servers of one model. Used by one process, the trainer's rank 0, from one thread.

    They are processes of this machine, on GPUs from ``first_gpu`` on; or with ``config.placement = "external"`` those that
    ``tepo serve`` runs: then starting waits for them, stopping leaves them, and reviving has their nodes replace them. With
    ``"colocated"`` they share the trainer's GPUs: they sleep after starting, reviving and :meth:`sleep`, and after an update
    until :meth:`wake_up`.

    ``dtype`` is that of the weights unless the config has its own; ``stop_token_ids`` end a response, and are its last id when
    they do; ``log_dir`` gets a ``server-N.log`` of each; the weights in ``model_dir`` are version 0; ``report`` gets a sentence
    for every fault that the fleet mends by itself. ``trained``: the first sample comes after a weight update, so that servers
    need not read weights (``config.load_format``). ``adapter_rank``: updates bring adapters of this rank alone
    (:meth:`update_adapters`). ``tokenizer``: servers load the model's, for stop strings and bad words. ``keep_cache``:
    responses that an update meets in their middle keep their keys and values, which otherwise the new weights compute again.
    A context manager: entering starts the servers, leaving stops them.
    """

    @property
    def weights_version(self) -> WeightsVersion | None:
        """The version that every server has; None before the start, and after a restart or a failed update until the next."""
        return self._version

    @property
    def addresses(self) -> list[str]:
        """Of all servers, as far as they have one yet."""
        return [server.url for server in self._servers if server.port]

    def start(self) -> None:
        """Start all servers side by side and return when all answer.

        May run in another thread than the rest; a stop() meanwhile ends it. Raises RuntimeError with the end of a server's log,
        after stopping all, if one does not come up.
        """
        self._start(self._servers)
        self._version = None if self._sleeps or self._starts_empty else INITIAL_WEIGHTS

    def stop(self) -> None:
        """End all processes of all servers, within seconds, for good; does nothing if there are none."""
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
        """Draw ``n`` responses to each prompt (token ids, at least one); the groups are in the order of the prompts.

        ``temperature`` 0 decodes greedily, and needs n = 1; ``top_p`` to ``bad_words`` are as in ``SamplingConfig``, the last
        two for servers with a tokenizer. Samples, of one prompt or of several, are independent draws; the same ``seed`` gives
        the same draws from the same weights, up to the numerics of batching; ``numbers`` name the prompts for that, where they
        are only some of those that were drawn for before: by default 0, 1, …. In this thread ``on_group`` is called with (a
        prompt's place, its responses) as they are complete, ``on_progress`` with (prompts done, all prompts), and ``on_move``
        when a server was seen to make tokens. Raises ServerDied when a server is gone, ValueError for an empty prompt,
        RuntimeError for whatever else a server answers.
        """
        if empty := [index for index, prompt in enumerate(prompts) if not prompt]:
            raise ValueError(f"prompt {empty[0]} is empty; a prompt needs at least one token")
        groups: list[list[Response | None]] = [[None] * n for _ in prompts]
        done = 0
        sampling = Sampling(temperature, max_new_tokens, (), top_p, top_k, min_p, stop, bad_words)
        with self.sample_stream(sampling, on_move=on_move) as stream:
            for at, prompt in enumerate(prompts):
                stream.submit(at, prompt, prompt_seed(seed, at if numbers is None else numbers[at]), n)
            for number, index, response in stream:
                groups[number][index] = response
                whole = [each for each in groups[number] if each is not None]
                if len(whole) == n:
                    done += 1
                    if on_group is not None:
                        on_group(number, whole)
                    if on_progress is not None:
                        on_progress(done, len(prompts))
        return [[response for response in group if response is not None] for group in groups]

    def sample_stream(
        self, sampling: SamplingSettings, *, sampling_mask: bool = False, on_move: Callable[[], None] = lambda: None
    ) -> FleetStream:
        """A stream of samples (``rollout.stream``), to be entered: prompts in at any time, responses out one by one as they
        finish. ``sampling``: a ``SamplingConfig``, or what has its fields. ``sampling_mask``: responses come with the tokens
        that could have been drawn in place of theirs, which needs ``top_k``.

        Used from one thread, while another may update the weights: the servers hold what they draw, and go on with the new
        weights; which token is of which is in each response's ``versions``. Raises RuntimeError where the servers do not have
        the current weights.
        """
        if not self._pools or (self._version is None and not self.updating):
            raise RuntimeError(
                "the servers do not have the current weights; start the fleet, and after a revive() update their weights"
            )
        config = self._config
        wanted = Sampling.of(sampling, self._stop_token_ids, sampling_mask=sampling_mask)
        return FleetStream(self, wanted, config.request_timeout_s, config.max_retries, config.max_num_seqs, on_move)

    def prompt_logprobs(self, prompt: Sequence[int]) -> dict[str, list[float]]:
        """Address → log-probs of the tokens of a prompt but the first, under temperature 1. Raises as :meth:`generate`."""
        found: dict[str, list[float]] = {}
        self._on_all(lambda client: found.update({client.url: self._ask_again(lambda: client.prompt_logprobs(prompt))}))
        return found

    def cached_logprobs(self, prompt: Sequence[int], n: int) -> dict[str, tuple[list[float], list[float]]]:
        """Address → log-probs of up to ``n`` tokens drawn after a prompt, with and without the prefix cache. Raises as
        :meth:`generate`.
        """
        version = self._version
        if version is None:
            raise RuntimeError("the servers do not have the current weights; update their weights first")
        found: dict[str, tuple[list[float], list[float]]] = {}
        self._on_all(
            lambda client: found.update({client.url: self._ask_again(lambda: client.cached_logprobs(prompt, n, version))})
        )
        return found

    def _ask_again(self, ask: Callable[[], T]) -> T:
        """The answer of one server, asked for again where it cannot be right."""
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
            self.raise_if_dead(error)
            raise

    def update_weights_from_tensors(self, version: WeightsVersion, manifest: TensorManifest, tensors: Iterable[Tensor]) -> None:
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

    def update_adapters(
        self, version: WeightsVersion, manifest: TensorManifest, tensors: Iterable[Tensor], settings: Mapping[str, Any]
    ) -> None:
        """Put LoRA adapters into all servers, which use them with the weights that they have; as
        :meth:`update_weights_from_tensors`. ``settings`` are those of a PEFT folder.
        """
        stream = iter(tensors)
        try:
            self._update(version, AdapterSync, lambda sync: sync.update_adapters(version, manifest, stream, settings))
        except (RuntimeError, ValueError):
            for _ in stream:
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
            # Also a server's fault outside the transfer: an engine whose worker is gone refuses a pause, and only then dies.
            died = isinstance(error, ServerFault) or any(not server.healthy() for server in self._servers)
            if died:
                self._blame(error)
            message = f"weights {version.step} did not reach the rollout servers: {error}"
            raise (ServerDied if died else type(error))(message) from error
        finally:
            if self._version is None:  # some servers may have the new weights, others half of them
                self._end()

    def revive(self) -> bool:
        """Start the servers that are gone again; True if there were any: the weights must then be updated again.

        Colocated servers sleep afterwards in any case, and so need the weights. Raises RuntimeError when there would be more
        than ``config.max_restarts`` restarts in this run; ServerDied as :meth:`sleep`.
        """
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
