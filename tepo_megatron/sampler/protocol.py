"""The contract of a sampler, checked by ``tests/contracts/sampler_contract.py``. ``sampler.registry`` makes a sampler."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NotRequired, Protocol, Self, TypedDict, Unpack

from numpy.typing import ArrayLike
from torch import Tensor

from tepo_megatron.config.rollout_server import ServerConfig
from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.sampler.sampling import SamplingSettings
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.transfer.full_tensors import TensorManifest
from tepo_megatron.weights.transfer.sender import ShardSender

INITIAL_WEIGHTS = WeightsVersion(0)
"""The weights of the model's folder."""

FAULT_FIGURES = ("servers/timeouts", "requests/retried")

NO_SERVERS = dict.fromkeys(("servers/restarts", *FAULT_FIGURES), 0.0)
"""The figures of a run without a sampler."""

KeyedResponse = tuple[Any, int, Response]
"""The key of the request, the number of the sample in its group, and the response."""


class ServerDied(RuntimeError):  # noqa: N818
    """The sampler lost a part that it cannot do without. ``Sampler.revive`` restores it, with stale weights."""


class SampleStream(Protocol):
    """Requests for samples go in at any time; responses come out as they finish.

    A context manager: leaving it drops what is unfinished. One thread uses it. Another may update the weights: a response in
    progress continues with the new ones, and ``versions`` has the (first token, version) of each part, oldest first.

    Sample ``j`` of a request has the seed ``seed + j``. The same prompt, seed and weights give the same response, up to the
    numerics of batching.
    """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def __iter__(self) -> Iterator[KeyedResponse]:
        """Yields responses as they finish, until none is unfinished. Raises as :meth:`next`."""

    @property
    def unfinished(self) -> int:
        """Samples that were requested and not returned yet."""

    @property
    def weights_version(self) -> WeightsVersion:
        """The newest weights that may draw the next token."""

    def submit(
        self,
        key: Hashable,
        prompt_ids: ArrayLike,
        seed: int,
        n: int = 1,
        *,
        continued: Mapping[int, Response] | None = None,
        only: Sequence[int] | None = None,
        room: int | None = None,
        home: Hashable = None,
    ) -> None:
        """Requests samples 0 to n − 1 of a prompt (token ids, at least one), or only the numbers in ``only``.

        A sample in ``continued`` continues the part that :meth:`abort` returned; its response includes the part. ``room``
        limits the new tokens below ``max_new_tokens``. Requests with the same ``home`` share a prefix cache if possible, until
        :meth:`leave`.

        Raises ValueError for an empty prompt, for n > 1 with temperature 0, and for a part that leaves no room.
        """

    def next(self, timeout_s: float | None) -> KeyedResponse | None:
        """The next response that finishes; None if none is unfinished, or after ``timeout_s`` seconds (None: no limit).

        Its finish reason is ``stop`` (the last token is a stop token, or completes a stop string) or ``length``. Raises
        ServerDied if the sampler lost servers and cannot continue, RuntimeError for any other failure.
        """

    def abort(self) -> list[KeyedResponse]:
        """Ends everything unfinished, but not the stream. Returns parts with at least one token, with finish reason ``abort``,
        and responses that finished meanwhile.
        """

    def leave(self, home: Hashable) -> None:
        """Forgets this ``home``."""


class WeightReceiver(Protocol):
    """Receives the trainer's weights. A run uses one of the three methods throughout.

    A method returns when every server uses the new weights for its next token; later responses carry ``version``. An error
    leaves the weights undefined: ServerDied if a server died (then :meth:`Sampler.revive` and repeat), otherwise RuntimeError
    or ValueError with the tensor at fault.
    """

    def update_weights_from_tensors(self, version: WeightsVersion, manifest: TensorManifest, tensors: Iterable[Tensor]) -> None:
        """Takes full tensors from this process. ``manifest`` has the Hugging Face name, shape and dtype name of each, in order.
        Consumes all ``tensors`` even on an error, since the trainer's ranks gather them together.
        """

    def update_weights_from_shards(self, version: WeightsVersion, sender: ShardSender) -> None:
        """Takes shards from all ranks. Those other than rank 0 call ``sender.update_as_non_root``."""

    def update_adapters(
        self, version: WeightsVersion, manifest: TensorManifest, tensors: Iterable[Tensor], settings: Mapping[str, Any]
    ) -> None:
        """Takes LoRA adapters for the weights of the model's folder. ``settings`` are those of a PEFT folder."""


class Sampler(WeightReceiver, Protocol):
    """Draws responses with the policy's weights. A context manager, for rank 0 only.

    Only :meth:`start` and streams may run in another thread. Methods that need servers raise ServerDied if one is gone.
    """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    @property
    def weights_version(self) -> WeightsVersion | None:
        """The version that all servers have; None before the start, and from a restart or failed update until the next."""

    @property
    def addresses(self) -> list[str]:
        """The addresses of the servers, for status reports."""

    def start(self) -> None:
        """Returns when the sampler is ready. A :meth:`stop` from another thread ends it. RuntimeError if a server fails."""

    def stop(self) -> None:
        """Ends everything for good, within seconds. May be repeated."""

    def revive(self) -> bool:
        """Restarts dead servers. True if there were any: then update the weights before the next sample.

        Raises RuntimeError after too many restarts in this run.
        """

    def sleep(self) -> None:
        """Releases the GPU memory that it shares with the trainer, if any, including the weights."""

    def wake_up(self) -> None:
        """After a weight update: takes back the rest of the released memory, and samples again."""

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
        """Draws ``n`` responses to each prompt, in the order of the prompts and samples.

        Prompt ``i`` has the group seed ``prompt_seed(seed, i)``, or ``prompt_seed(seed, numbers[i])``. Temperature 0 is greedy
        and needs n = 1. This thread calls ``on_group`` (index of the prompt, responses) for a complete group, ``on_progress``
        (prompts done, all prompts), and ``on_move`` when a server made tokens. Raises as :meth:`SampleStream.submit` and
        ``next``.
        """

    def sample_stream(
        self, sampling: SamplingSettings, *, sampling_mask: bool = False, on_move: Callable[[], None] = lambda: None
    ) -> SampleStream:
        """Returns a stream, not entered yet. ``sampling_mask``: each response has the token ids that could have been drawn at
        each position, which needs ``top_k``. Raises RuntimeError if the sampler does not have the current weights.
        """

    def prompt_logprobs(self, prompt: Sequence[int]) -> dict[str, list[float]]:
        """Each server's natural log-probs of all tokens of the prompt but the first, at temperature 1, by address."""

    def cached_logprobs(self, prompt: Sequence[int], n: int) -> dict[str, tuple[list[float], list[float]]]:
        """Each server's log-probs of up to ``n`` tokens drawn after the prompt, with its prefix cache and without."""

    def figures(self) -> dict[str, float]:
        """The metrics of ``NO_SERVERS`` since the last call."""


class SamplerOptions(TypedDict):
    """The arguments of a sampler besides ``rollout.server``.

    ``dtype`` is that of the weights; ``report`` gets a sentence for every fault that the sampler repairs itself.
    ``keep_cache``: responses that an update interrupts keep their keys and values. ``trained``: a weight update comes before
    the first sample. ``adapter_rank``: updates bring LoRA adapters of this rank. ``tokenizer``: load the model's, for stop
    strings and bad words.
    """

    model_dir: Path
    dtype: str
    stop_token_ids: Sequence[int]
    log_dir: Path
    seed: NotRequired[int]
    first_gpu: NotRequired[int]
    report: NotRequired[Callable[[str], None]]
    keep_cache: NotRequired[bool]
    trained: NotRequired[bool]
    adapter_rank: NotRequired[int | None]
    tokenizer: NotRequired[bool]


class SamplerFactory(Protocol):
    """Makes a sampler without starting it."""

    def __call__(self, config: ServerConfig, /, **options: Unpack[SamplerOptions]) -> Sampler: ...


@dataclass(frozen=True)
class SamplerSpec:
    """An implementation, for ``sampler.registry``. The checks raise ValueError with what the user can change."""

    make: SamplerFactory
    check_model: Callable[[ServerConfig, ModelSpec], None]
    """Raises if the sampler cannot split the model as the config asks."""
    check_machine: Callable[[ServerConfig, ModelSpec], None]
    """Raises if this machine cannot compute the model as the config asks."""
    cores: Callable[[ServerConfig, Sequence[int]], set[int]]
    """The available CPU cores that it will use."""
