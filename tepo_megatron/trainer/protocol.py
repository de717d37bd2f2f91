"""The contract between a run and its trainer; ``tests/contracts/trainer_contract.py`` checks it.

Trainers are one object per rank. All ranks call every method, in the same order, unless its docstring differs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tepo_megatron.config import RunConfig
    from tepo_megatron.runtime.heartbeat import Heartbeat
    from tepo_megatron.weights.architecture import ModelSpec
    from tepo_megatron.weights.layouts import VllmParallel
    from tepo_megatron.weights.storage.hf_folder import AdapterSettings
    from tepo_megatron.weights.transfer.full_tensors import TensorManifest
    from tepo_megatron.weights.transfer.sender import ShardSender

T = TypeVar("T")


@dataclass(frozen=True)
class UpdateResult:
    """Is the same on every rank.

    If a number was not finite, the step was skipped: the trainer is as before, ``loss`` and ``grad_norm`` may be NaN, and
    ``sums``, ``extrema`` and ``token_values`` are empty.
    """

    loss: float
    grad_norm: float  # L2 norm over all trained parameters, before clipping
    lr: float
    sums: Mapping[str, tuple[float, float]]  # metric → (sum, count) over the mini-batch
    extrema: Mapping[str, float]  # metric that ends in ``/min`` or ``/max`` → value
    skipped: str = ""  # the first cause, as one sentence; empty if the step was made
    not_finite: Sequence[Mapping[str, Any]] = ()  # what each rank found, as JSON objects
    token_values: Mapping[str, Tensor] = field(default_factory=dict)
    """Name → [R], for tokens (prompts included) of sequences with ``Batch.recorded_S`` >= 0; undefined outside the mask."""
    moves: Tensor | None = None
    """`ObjectiveOutput.moves`, on the host."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """The slowest rank's seconds."""

    path: Path
    step: int
    stage_s: float  # copying states to host memory
    write_s: float  # includes copying unless the save ran in the background
    waited_s: float  # part of both during which training waited


class WeightSource(Protocol):
    """After ``update(last=True)`` a reader sees complete new values."""

    def version(self, step: int) -> WeightsVersion:
        """Equal weights give equal digests, on any rank and layout."""

    @property
    def manifest(self) -> TensorManifest:
        """Describes ``stream``'s tensors in order. Not collective."""

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
        transport: str,
        timeout_s: float,
        or_gloo: bool = False,
    ) -> ShardSender:
        """Makes this rank's end of weight updates from shard to shard. No communication.

        ``local`` maps a worker (numbered over all servers) to the trainer rank on its GPU; ``dtype`` is the servers'. Raises
        ValueError if vLLM cannot split the model over ``servers``, or the trainer only has full tensors.
        """

    def export(self, out: Path) -> None:
        """Writes a Hugging Face folder (weights, config, tokenizer) on rank 0."""

    def export_adapters(self, out: Path) -> None:
        """Writes a PEFT folder on rank 0; nothing without adapters."""

    @property
    def adapter_manifest(self) -> TensorManifest:
        """Describes ``stream_adapters``."""

    @property
    def adapter_settings(self) -> AdapterSettings:
        """Called only with adapters, like the next method."""

    def stream_adapters(self) -> Iterator[tuple[str, Tensor | None]]:
        """As ``stream``."""


class Checkpoints(Protocol):
    """Saves and restores everything that later steps depend on. Under the same layout a resumed run continues bit for bit."""

    def begin(self, folder: Path, *, step: int, state: dict[str, Any], background: bool = False) -> None:
        """Starts to write ``folder/step_XXXXXX``, after finishing any unfinished save.

        ``state``, rank 0's, goes into ``state.json``, with ``step``, ``updates``, ``weights_digest``, ``model`` (path),
        ``reference_digest`` and ``identity`` (``describe_run``). With ``background`` training may continue at once; the
        checkpoint has this call's values. Until ``finish`` the folder ends in ``.partial``. Every rank raises RuntimeError
        if any cannot write; older checkpoints stay.
        """

    def finish(self, *, wait: bool = True) -> SavedCheckpoint | None:
        """Returns None if nothing is unfinished, or without ``wait`` if a rank still writes. Raises as ``begin``."""

    def check(self, folder: Path) -> dict[str, Any]:
        """Reads every byte. Returns ``state`` with ``step`` added, or raises DamagedCheckpoint on every rank."""

    def load(self, folder: Path, checked: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the result of ``check``, which may be passed as ``checked``.

        Raises DamagedCheckpoint before any restoring, and RuntimeError if the weights' digest is not the saved one.
        """


class Trainer(Protocol):
    @property
    def spec(self) -> ModelSpec:
        """Returns the model's shape, from ``config.json``."""

    @property
    def weights(self) -> WeightSource: ...

    @property
    def checkpoints(self) -> Checkpoints: ...

    @property
    def reference_digest(self) -> str | None:
        """None if no reference is needed, or its weights are rounded differently under other layouts."""

    def batch_from_root(self, rollouts: list[Rollout] | None, teachers: Sequence[int] | None = None) -> Batch:
        """Packs rank 0's rollouts (others are not read) in order, with advantages, for every rank. ``teachers``: the place in
        the config of each one's teacher, if there are several. Raises ValueError on every rank for rollouts that cannot be
        trained on, as those without experts or sampling masks that the config needs.
        """

    def score(self, batch: Batch) -> Batch:
        """Adds ``old_logprobs_T``, ``old_entropy_T``, and those of the reference and of teachers if needed, under the sampling
        temperature.

        ``batch`` is a mini-batch; until the weights change, ``update`` computes the same bits. If a value is not finite,
        all are NaN, and update skips it.
        """

    def update(self, batch: Batch, *, last: bool = True) -> UpdateResult:
        """Makes one AdamW step on a mini-batch from ``score``, the same for any micro-batches and ranks.

        ``last`` must be true unless another update reads the weights next.
        """

    def measure_noise(self, batch: Batch) -> dict[str, float]:
        """Returns quantiles of scores' moves, in the same micro-batches, if all weights are rounded once more: the objective's
        tolerance.

        Weights stay, to the bit. ``batch`` is a whole step's. Empty if scores are not finite.
        """

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        """Returns natural-log probabilities of ``prompt[1:]`` at temperature 1, on every rank."""

    def onload(self) -> None:
        """Moves everything onto the GPU.

        This and the next two methods change no bit, come in any order, and do nothing without ``shares_gpus``.
        """

    def onload_weights_only(self) -> None:
        """Enough for ``weights`` and ``prompt_logprobs``."""

    def offload(self) -> None:
        """Moves everything to the host."""

    def memory(self) -> dict[str, float]:
        """Returns GiB, maxima over ranks since the last call. Empty on CPUs."""

    def take_routing_metrics(self) -> dict[str, float]:
        """Returns experts' load since the last call, on every rank. Empty for dense models."""

    def broadcast_from_root(self, value: T) -> T:
        """Returns rank 0's ``value`` as JSON (tuples become lists). Others wait without time limit or GPU."""

    def close(self) -> None:
        """Leaves the process groups."""


class TrainerKind(Protocol):
    """Importing such a module is cheap: no framework, no CUDA."""

    def prepare_process(self, config: RunConfig) -> None:
        """Sets environment variables. Every rank calls before CUDA."""

    def check_config(self, config: RunConfig, spec: ModelSpec, *, on_gpu: bool, teachers: Mapping[str, ModelSpec]) -> None:
        """Raises ValueError for what this trainer cannot train. Starts no process and no CUDA."""

    def make_trainer(
        self, config: RunConfig, model_dir: Path, *, teachers: Mapping[str, Path], shares_gpus: bool, heartbeat: Heartbeat
    ) -> Trainer:
        """Every rank calls. Raises ValueError for a model that does not fit the layout.

        ``teachers``: folders of those with ``place = ranks``. ``shares_gpus``: servers and trainer take turns on GPUs.
        ``heartbeat`` starts when the ranks have met.
        """


_KINDS = {"megatron": "tepo_megatron.trainer.megatron"}  # imported when used


def trainer_kind(name: str = "megatron") -> TrainerKind:
    if name not in _KINDS:
        raise ValueError(f"there is no trainer {name!r}; it is one of {', '.join(sorted(_KINDS))}")
    return cast(TrainerKind, importlib.import_module(_KINDS[name]))


def check_plugins(config: RunConfig) -> None:
    """Raises ValueError if a plugin's loss depends on micro-batches, ranks, sequence order, or padding."""
    if not config.objective.plugins:
        return
    from tepo_megatron.core.objective.checking import ObjectiveChecks

    parts = len(config.reward.weights) if config.reward.weights else 2
    for rule, problem in ObjectiveChecks(config.objective, reward_parts=parts).invariance():
        if problem:
            plugins = ", ".join(config.objective.plugins)
            if "IndexError" in problem and "reward_parts" in config.objective.needs and not config.reward.weights:
                problem += "; a reward had 2 components here: if yours has others, name them in reward.weights"
            raise ValueError(
                f"the objective, with {plugins}, breaks a rule ({rule}): {problem} ('tepo objective check' tries all rules)"
            )
