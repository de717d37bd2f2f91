"""The trainer: which model, how it is split over ranks, how it is optimised."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tepo_megatron.config.base import Section
from tepo_megatron.config.fp8 import Fp8Config


class ModelConfig(Section):
    path: str = "builtin:tiny"
    """Hugging Face folder with config.json, safetensors and tokenizer; ``builtin:tiny`` is the warm start in this package."""

    shards: Path | None = None
    """Folder that ``tepo import`` made of ``path``: the trainer's ranks read their weights from it, the rest from ``path``."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """What weights and activations are kept in, in the trainer and (unless overridden there) in the rollout server."""


class ParallelConfig(Section):
    tp: PositiveInt = 1
    """Tensor-parallel size: heads, MLP and vocabulary are split over so many ranks."""

    pp: PositiveInt = 1
    """Pipeline-parallel size: layers are split over so many stages."""

    dp: PositiveInt = 1
    """Data-parallel size. The world is tp × pp × cp × dp processes."""

    vpp: PositiveInt = 1
    """Virtual pipeline stages per rank (interleaved 1F1B). ``tepo plan`` reckons with them; the engine refuses more than 1."""

    cp: PositiveInt = 1
    """Context-parallel size: sequences are split over so many ranks. As ``vpp``: planned with, refused by the engine."""

    ep: PositiveInt = 1
    """Expert-parallel size: the experts of a mixture-of-experts model are split over so many ranks, taken out of tp × dp."""

    etp: PositiveInt | None = None
    """Expert-tensor-parallel size: each expert is split over so many ranks. Default: tp, as in Megatron-Core."""

    sequence_parallel: bool = False
    """Split activations outside attention and MLP over the tensor-parallel ranks (Megatron's SP)."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @model_validator(mode="after")
    def _sequence_parallel_needs_tp(self) -> "ParallelConfig":
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel = true needs tp > 1; set tp, or sequence_parallel = false")
        return self

    @model_validator(mode="after")
    def _experts_fit_a_stage(self) -> "ParallelConfig":
        etp, ranks = self.tp if self.etp is None else self.etp, self.tp * self.cp * self.dp
        if ranks % (self.ep * etp):
            raise ValueError(
                f"ep × etp = {self.ep} × {etp} does not divide the {ranks} ranks of a pipeline stage (tp × cp × dp); "
                "lower ep, or raise dp"
            )
        return self

    @model_validator(mode="after")
    def _virtual_stages_need_stages(self) -> "ParallelConfig":
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp = {self.vpp} divides pipeline stages further and needs pp > 1; set pp, or vpp = 1")
        return self


class EngineConfig(Section):
    platform: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer runs; ``auto`` is CUDA if torch sees a GPU. The CUDA path has not been run on a GPU yet."""

    layers: Literal["auto", "te", "local"] = "auto"
    """``te``: Transformer Engine's fused layers, on a GPU; ``local``: Megatron-Core's own with torch's attention and norm,
    anywhere. ``auto`` is ``te`` on a GPU and ``local`` on a CPU; a run that should have ``te`` and cannot stops."""

    fp8: Fp8Config = Fp8Config()
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The part of a GPU's memory beyond which the trainer's allocations fail; ``memory/peak_gib`` in the metrics says what it
    took. In the colocated placement servers that sleep keep some too."""

    parallel: ParallelConfig = ParallelConfig()

    micro_batch_tokens: PositiveInt = 4096
    """Upper bound on the tokens packed into one micro-batch; a longer sequence gets a micro-batch of its own."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation, as in Megatron-Core."""

    score_backend: Literal["auto", "torch", "cpp", "triton"] = "auto"
    """What sweeps the logits for log-probs and entropies: ``cpp`` on a CPU with a compiler, ``triton`` on a GPU, ``torch``
    anywhere. ``auto`` is ``triton`` on a GPU where Triton is installed, else ``torch``."""

    @model_validator(mode="after")
    def _layers_fit_the_platform(self) -> "EngineConfig":
        if self.layers == "te" and self.platform == "cpu":
            raise ValueError("layers = te needs a GPU, and platform = cpu; set layers = local, or another platform")
        if self.fp8.enabled and (self.layers == "local" or self.platform == "cpu"):
            instead = "layers = local" if self.layers == "local" else "platform = cpu"
            raise ValueError(
                f"fp8.recipe = {self.fp8.recipe} needs Transformer Engine's layers on a GPU, but {instead}; set fp8.recipe = "
                "none, or layers = te on a GPU"
            )
        return self


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-6
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps (mini-batches) over which the learning rate rises linearly from 0."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up, until the last step of the run."""

    min_lr: float = Field(default=0.0, ge=0)
    """Where ``linear`` and ``cosine`` end."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: float = Field(default=0.0, ge=0)
    clip_grad: float = Field(default=1.0, ge=0)
    """Bound of the global gradient norm; 0 switches clipping off."""

    distributed: bool = False
    """Shard optimizer states over the data-parallel ranks (Megatron's distributed optimizer)."""
