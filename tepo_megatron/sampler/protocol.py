"""A sampler's contract, checked by ``tests/contracts/sampler_contract.py``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, Protocol, Self, TypedDict, Unpack

from numpy.typing import ArrayLike
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import Response, TopTokens, WeightsVersion
from tepo_megatron.sampler.sampling import Sampling, SamplingSettings, prompt_seed
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.transfer.full_tensors import TensorManifest
from tepo_megatron.weights.transfer.sender import ShardSender

INITIAL_WEIGHTS = WeightsVersion(0)  # the model's folder

NO_SERVERS = dict.fromkeys(("servers/restarts", "servers/timeouts", "requests/retried"), 0.0)

KeyedResponse = tuple[Any, int, Response]
"""Has the request's key, the sample's number in its group, and the response."""


class ServerDied(RuntimeError):  # noqa: N818
    """``Sampler.revive`` restores servers, with stale weights."""


class SubmitOptions(TypedDict, total=False):
    continued: Mapping[int, Response] | None  # parts from ``abort`` by their numbers; responses include them
    only: Sequence[int] | None  # numbers of samples, instead of 0 to n − 1
    room: int | None  # the most new tokens
    home: Hashable  # requests with one share a prefix cache until ``leave``


def refuse_others(options: SubmitOptions, supported: Iterable[str] = SubmitOptions.__optional_keys__) -> None:
    if unknown := options.keys() - {*supported}:
        raise TypeError(f"submit() has no option {', '.join(sorted(unknown))}; there are {', '.join(sorted(supported))}")


class ResponseStream(Protocol):
    """Takes requests at any time, and returns responses as they finish.

    One thread uses it; leaving the context drops unfinished samples.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_exception: object) -> None: ...

    @property
    def unfinished(self) -> int:
        """Excludes returned samples."""

    def submit(self, key: Hashable, prompt_ids: ArrayLike, seed: int, n: int = 1, **options: Unpack[SubmitOptions]) -> None:
        """Raises ValueError for an empty prompt, n > 1 with temperature 0, and a part that leaves no room."""

    def next(self, timeout_s: float | None) -> KeyedResponse | None:
        """Returns None if no sample is unfinished, or after ``timeout_s``.

        The finish reason is ``stop`` (a stop token or string) or ``length``. Raises ServerDied if the sampler cannot continue,
        otherwise RuntimeError.
        """

    def abort(self) -> list[KeyedResponse]:
        """Returns parts with a token (finish reason ``abort``), and finished responses."""


class SampleStream(ResponseStream, Protocol):
    """Another thread may update the weights: responses in progress continue with the new ones, and ``versions`` has (first
    token, version).

    Sample ``j`` has the seed ``seed + j``. The same prompt, seed and weights give the same response, up to batching's numerics.
    """

    def __iter__(self) -> Iterator[KeyedResponse]:
        """Raises as ``next``."""

    @property
    def weights_version(self) -> WeightsVersion:
        """The newest weights for the next token."""

    def leave(self, home: Hashable) -> None:
        """Forgets ``home``."""


class WeightReceiver(Protocol):
    """A run uses one method. It returns when every server uses the new weights for its next token.

    An error leaves the weights undefined: ServerDied (then ``Sampler.revive`` and repeat), otherwise OSError, or
    RuntimeError or ValueError with the tensor.
    """

    @abstractmethod
    def update_weights_from_tensors(self, version: WeightsVersion, manifest: TensorManifest, tensors: Iterable[Tensor]) -> None:
        """``manifest`` has (Hugging Face name, shape, dtype name). Consumes all even on an error, as the ranks gather
        them together.
        """

    @abstractmethod
    def update_weights_from_shards(self, version: WeightsVersion, sender: ShardSender) -> None:
        """Ranks other than 0 call ``sender.update_as_non_root``."""

    @abstractmethod
    def update_adapters(
        self, version: WeightsVersion, manifest: TensorManifest, tensors: Iterable[Tensor], settings: Mapping[str, Any]
    ) -> None:
        """``settings`` are a PEFT folder's. The weights stay the folder's."""


class Sampler(WeightReceiver, Protocol):
    """Draws responses on rank 0, as a context manager; an implementation inherits it.

    Only ``start`` and streams may run in another thread. Methods may raise ServerDied.
    """

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    @property
    @abstractmethod
    def weights_version(self) -> WeightsVersion | None:
        """None unless all servers have the same version."""

    @property
    @abstractmethod
    def addresses(self) -> list[str]:
        """The servers' addresses."""

    def describe(self) -> list[str]:
        """Returns a line for each server, for ``tepo status``. Called after each step."""
        return self.addresses

    @abstractmethod
    def start(self) -> None:
        """Returns when ready, or after ``stop``. Raises RuntimeError if a server fails."""

    @abstractmethod
    def stop(self) -> None:
        """May be repeated."""

    @abstractmethod
    def revive(self) -> bool:
        """Restarts dead servers; if True, update weights before new samples. Raises RuntimeError after too many restarts."""

    @abstractmethod
    def sleep(self) -> None:
        """Frees GPU memory shared with the trainer, including the weights."""

    @abstractmethod
    def wake_up(self) -> None:
        """Takes the remaining memory back after a weight update."""

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
        """Draws ``n`` responses to each prompt, in their order.

        Prompt ``i`` has the group seed ``prompt_seed(seed, i)``, or ``prompt_seed(seed, numbers[i])``. Temperature 0 is greedy
        and needs n = 1. ``on_group`` gets (prompt's index, responses), ``on_progress`` (prompts done, all), ``on_move`` runs
        when a server made tokens. Raises as ``SampleStream.submit`` and ``next``.
        """
        groups: list[dict[int, Response]] = [{} for _ in prompts]
        done = 0
        sampling = Sampling(temperature, max_new_tokens, (), top_p, top_k, min_p, stop, bad_words)
        with self.sample_stream(sampling, on_move=on_move) as stream:
            for index, prompt in enumerate(prompts):
                stream.submit(index, prompt, prompt_seed(seed, index if numbers is None else numbers[index]), n)
            for index, sample, response in stream:
                groups[index][sample] = response
                if len(groups[index]) == n:
                    done += 1
                    if on_group is not None:
                        on_group(index, [groups[index][sample] for sample in range(n)])
                    if on_progress is not None:
                        on_progress(done, len(prompts))
        return [[group[sample] for sample in range(n)] for group in groups]

    @abstractmethod
    def sample_stream(
        self, sampling: SamplingSettings, *, sampling_mask: bool = False, on_move: Callable[[], None] = lambda: None
    ) -> SampleStream:
        """``sampling_mask``: responses have each position's possible token ids; needs ``top_k``.

        Raises RuntimeError without the current weights.
        """

    @abstractmethod
    def prompt_logprobs(self, prompt: Sequence[int]) -> dict[str, list[float]]:
        """Returns, by address, natural log-probs of all tokens but the first, at temperature 1."""

    @abstractmethod
    def score(self, tokens: Sequence[int], k: int = 0) -> Scores:
        """As ``prompt_logprobs``, from any one server, in any thread; other servers repeat what one fails to do. ``k``: also
        the most likely tokens at each place.
        """

    @abstractmethod
    def read_through_cache(self, prompt: Sequence[int], n: int) -> dict[str, CacheReading]:
        """Returns, by address, log-probs of up to ``n`` tokens drawn after ``prompt``, with the prefix cache and without."""

    @abstractmethod
    def read_back(self) -> dict[str, ReadBack]:
        """Compares, by address, the weights in use with those of the last update, bit by bit."""

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """Covers the time since the last call."""


class Scores(NamedTuple):
    """Covers all tokens but the first."""

    logprobs: list[float]
    top: TopTokens | None = None


class CacheReading(NamedTuple):
    """``cached_tokens``: tokens of the prompt whose keys and values were there before it was first read since the update."""

    logprobs: list[float]
    logprobs_without: list[float]
    cached_tokens: int


class ReadBack(NamedTuple):
    """``changed``: names of parameters that are not as the trainer sent them. ``share`` of elements that could be compared."""

    changed: list[str]
    share: float


class SamplerOptions(TypedDict):
    """``report`` gets a sentence per repaired fault. ``keep_cache``: responses keep keys and values in an update. ``trained``:
    a weight update precedes the first sample. ``tokenizer``: load it, for stop strings and bad words. ``with_ranks``: it ends
    with this process, also if ``outlive_ranks`` has servers for the policy; its weights never change.
    """

    model_dir: Path
    dtype: str
    stop_token_ids: Sequence[int]
    log_dir: Path
    seed: NotRequired[int]
    first_gpu: NotRequired[int]
    cores: NotRequired[Sequence[int]]
    report: NotRequired[Callable[[str], None]]
    keep_cache: NotRequired[bool]
    trained: NotRequired[bool]
    adapter_rank: NotRequired[int | None]
    tokenizer: NotRequired[bool]
    with_ranks: NotRequired[bool]


@dataclass(frozen=True)
class SamplerSpec:
    """``make`` takes ServerConfig and SamplerOptions, and does not start. Checks raise ValueError with the remedy. In
    ``outlive_ranks`` servers of this machine run beside ranks that are started in it, for ``train.max_restarts``.
    """

    make: Callable[..., Sampler]
    check_model: Callable[[ServerConfig, ModelSpec], None]
    check_machine: Callable[[ServerConfig, ModelSpec], None]
    cores: Callable[[ServerConfig, Sequence[int]], set[int]]
    outlive_ranks: Callable[[RunConfig], AbstractContextManager[None]]


_SAMPLERS = {"vllm": "tepo_megatron.sampler.fleet.fleet"}


def make_sampler(config: ServerConfig, *, name: str = "vllm", **options: Unpack[SamplerOptions]) -> Sampler:
    """Does not start it. Raises ValueError."""
    return sampler_spec(name).make(config, **options)


def sampler_spec(name: str = "vllm") -> SamplerSpec:
    if name not in _SAMPLERS:
        raise ValueError(f"there is no sampler {name!r}; there is {', '.join(_SAMPLERS)}")
    return import_module(_SAMPLERS[name]).SAMPLER
