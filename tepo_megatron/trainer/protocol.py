"""The contract between a run and its trainer.

A trainer is one object per rank of the torchrun world. Every method is collective: all ranks call it, in the same order, unless
its docstring says otherwise. ``tests/contracts/trainer_contract.py`` checks an implementation; ``trainer/registry.py`` lists
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tepo_megatron.config import RunConfig
    from tepo_megatron.runtime.watch.heartbeat import Heartbeat
    from tepo_megatron.weights.architecture import ModelSpec
    from tepo_megatron.weights.layouts import VllmParallel
    from tepo_megatron.weights.storage.hf_folder import AdapterSettings
    from tepo_megatron.weights.transfer.sender import ShardSender
    from tepo_megatron.weights.transfer.transport import TransportName

T = TypeVar("T")


@dataclass(frozen=True)
class UpdateResult:
    """The result of one optimizer step, the same on every rank.

    If a number was not finite, the step was skipped: weights, optimizer states and learning rate are as before, ``loss`` and
    ``grad_norm`` may be NaN, and ``sums``, ``extrema`` and ``token_values`` are empty.
    """

    loss: float
    """The loss of the whole mini-batch."""
    grad_norm: float
    """L2 norm over all trained parameters, before clipping."""
    lr: float
    """The learning rate of this step, or the unchanged one if the step was skipped."""
    sums: Mapping[str, tuple[float, float]]
    """Metric → (sum, count) over the mini-batch."""
    extrema: Mapping[str, float]
    """Metric that ends in ``/min`` or ``/max`` → value over the mini-batch."""
    skipped: str = ""
    """The first cause, as one sentence; empty if the step was made."""
    not_finite: Sequence[Mapping[str, Any]] = ()
    """What each rank found, as JSON objects."""
    token_values: Mapping[str, Tensor] = field(default_factory=dict)
    """Name → [R], for the R tokens (prompts included) of the sequences with ``Batch.recorded_S`` >= 0, in the mini-batch's
    order. Values outside the loss mask are undefined.
    """


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint. Durations are those of the slowest rank, in seconds."""

    path: Path
    step: int
    stage_s: float
    """Copying states to host memory."""
    write_s: float
    """Writing; includes copying unless the save ran in the background."""
    waited_s: float
    """The part of both during which training waited."""


@dataclass(frozen=True)
class TensorMeta:
    """A full tensor that a stream yields. ``dtype`` is a torch dtype's name without ``torch.``."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class WeightSource(Protocol):
    """The trained weights, for servers and exports. After ``update(last=True)`` a reader sees complete new values."""

    def version(self, step: int) -> WeightsVersion:
        """Returns ``step`` and a digest of all weights, the same on every rank. Equal bits give equal digests in any layout."""

    @property
    def manifest(self) -> Sequence[TensorMeta]:
        """Returns name, shape and dtype of every tensor of :meth:`stream`, in its order. Not collective."""

    def stream(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yields (Hugging Face name, full tensor) on rank 0 and (name, None) elsewhere. Every rank must exhaust it.

        Adapters are merged.
        """

    def make_shard_sender(
        self,
        servers: VllmParallel,
        *,
        local: Mapping[int, int],
        dtype: torch.dtype,
        transport: TransportName,
        timeout_s: float,
        or_gloo: bool = False,
    ) -> ShardSender:
        """Makes this rank's end of weight updates from shard to shard. Every rank calls, but there is no communication.

        ``local`` maps a server's worker (numbered over all servers) to the trainer rank on the same GPU; ``dtype`` is the
        servers'; ``timeout_s`` bounds every wait. Raises ValueError if vLLM cannot split the model over ``servers``, or if the
        trainer only has full tensors (``rollout.server.transfer = gather``).
        """

    def export(self, out: Path) -> None:
        """Writes a Hugging Face folder ``out`` (weights, config, tokenizer). Rank 0 writes."""

    def export_adapters(self, out: Path) -> None:
        """Writes the adapters as a PEFT folder; does nothing if the run trains none. Rank 0 writes."""

    @property
    def adapter_manifest(self) -> Sequence[TensorMeta]:
        """Returns the :attr:`manifest` of :meth:`stream_adapters`."""

    @property
    def adapter_settings(self) -> AdapterSettings:
        """Returns the settings of the adapters' PEFT folder. Called only if the run trains adapters, like the next method."""

    def stream_adapters(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yields the adapters' tensors as :meth:`stream` does."""


class Checkpoints(Protocol):
    """Saves and restores everything that later steps depend on: weights, optimizer states, schedule, counters.

    Under the same layout a resumed run continues bit for bit. ``trainer/checkpoints/folder.py`` names the folders.
    """

    def begin(self, folder: Path, *, step: int, state: dict[str, Any], background: bool = False) -> None:
        """Starts to write ``folder/step_XXXXXX``, after finishing any unfinished save.

        ``state``, rank 0's, is stored in ``state.json``, with ``step``, ``updates``, ``weights_digest``, ``model`` (path),
        ``reference_digest`` and ``identity`` (``describe_run``). With ``background`` training may continue at once; the
        checkpoint has the values of this call. Until :meth:`finish` the folder has the suffix ``.partial``. Raises RuntimeError
        on every rank if any rank cannot write, and leaves older checkpoints as they were.
        """

    def finish(self, *, wait: bool = True) -> SavedCheckpoint | None:
        """Completes the checkpoint of :meth:`begin`. Returns None if there is none, or if ``wait`` is false and a rank still
        writes.

        Raises as :meth:`begin`.
        """

    def check(self, folder: Path) -> dict[str, Any]:
        """Reads every byte, restores nothing. Returns the stored ``state`` with ``step`` added.

        All ranks return it, or all raise the same DamagedCheckpoint.
        """

    def load(self, folder: Path, checked: dict[str, Any] | None = None) -> dict[str, Any]:
        """Restores the trainer. Returns the result of :meth:`check`, which may be passed as ``checked``.

        Raises DamagedCheckpoint before anything is restored, and RuntimeError if the weights' digest is not the saved one.
        """


class Trainer(Protocol):
    """Model, objective and optimizer of one rank."""

    @property
    def spec(self) -> ModelSpec:
        """Returns the model's shape, from ``config.json``."""

    @property
    def weights(self) -> WeightSource: ...

    @property
    def checkpoints(self) -> Checkpoints: ...

    @property
    def reference_digest(self) -> str | None:
        """Returns the digest of the frozen reference model's weights, made as in :meth:`WeightSource.version`.

        None if the objective needs no reference model.
        """

    def batch_from_root(self, rollouts: list[Rollout] | None) -> Batch:
        """Packs rank 0's rollouts in their order, with advantages, for every rank. Only rank 0's argument is read.

        Raises ValueError on rank 0 if a rollout lacks a record that the config needs (experts, sampling masks).
        """

    def score(self, batch: Batch) -> Batch:
        """Adds ``old_logprobs_T`` and ``old_entropy_T`` (float32 [T]) of the current weights under the sampling temperature,
        and ``reference_logprobs_T`` if the objective needs them.

        ``batch`` is a mini-batch. The values are exact for :meth:`update` of the same mini-batch: while the weights are
        unchanged, update computes the same bits. If a value is not finite, all are NaN, and update skips the mini-batch.
        """

    def update(self, batch: Batch, *, last: bool = True) -> UpdateResult:
        """Makes one AdamW step, as ``config.optimizer`` sets it, on a mini-batch that :meth:`score` returned.

        The gradient is that of the objective over the whole mini-batch, however it is divided into micro-batches and ranks.
        Norms and biases have no weight decay. Skipped on every rank if a loss or gradient of any rank is not finite. ``last``
        must be true unless another update is the next to read the weights.
        """

    def measure_noise(self, batch: Batch) -> dict[str, float]:
        """Returns quantiles (metric → value) of how far scores of the same weights differ by a token's place in a micro-batch.

        From then on they are the objective's tolerance. ``batch`` is a whole step's. Empty if scores are not finite.
        """

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        """Returns natural-log probabilities of ``prompt[1:]`` given their predecessors, at temperature 1, on every rank."""

    def onload(self) -> None:
        """Moves weights, optimizer states and gradients onto the GPU, for scores, updates and checkpoints.

        This and the next two methods change no bit, may be called in any order and repeatedly, and do nothing unless the
        trainer was made with ``shares_gpus``.
        """

    def onload_weights_only(self) -> None:
        """Moves the weights onto the GPU, for :attr:`weights` and :meth:`prompt_logprobs`, and everything else to the host."""

    def offload(self) -> None:
        """Moves everything to the host, so that servers can use the GPUs."""

    def memory(self) -> dict[str, float]:
        """Returns metrics in GiB, maxima over the ranks since the last call. Empty on CPUs."""

    def take_routing_metrics(self) -> dict[str, float]:
        """Returns the experts' load in the scores since the last call, the same on every rank. Empty for a dense model."""

    def broadcast_from_root(self, value: T) -> T:
        """Returns rank 0's ``value`` as JSON returns it (tuples become lists), on every rank. Only rank 0's argument is read.

        The other ranks wait without a time limit and without using a GPU.
        """

    def close(self) -> None:
        """Leaves the process groups. Nothing is called afterwards."""


class TrainerKind(Protocol):
    """A module that makes trainers of one kind. Importing it is cheap: no trainer framework, no CUDA."""

    def prepare_process(self, config: RunConfig) -> None:
        """Sets environment variables of this process. Called on every rank, before any CUDA call."""

    def check_config(self, config: RunConfig, spec: ModelSpec, *, on_gpu: bool) -> None:
        """Raises ValueError for a model and settings that this trainer cannot train, before any process is started."""

    def make_trainer(self, config: RunConfig, model_dir: Path, *, shares_gpus: bool, heartbeat: Heartbeat) -> Trainer:
        """See :func:`tepo_megatron.trainer.registry.make_trainer`."""
