"""The trainer: which model, how it is split over ranks, how it is optimised."""

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tepo_megatron.config.base import Section


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
    def _virtual_stages_need_stages(self) -> "ParallelConfig":
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp = {self.vpp} divides pipeline stages further and needs pp > 1; set pp, or vpp = 1")
        return self


class EngineConfig(Section):
    platform: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer runs; ``auto`` is CUDA if torch sees a GPU. The CUDA path has not been run on a GPU yet."""

    parallel: ParallelConfig = ParallelConfig()

    micro_batch_tokens: PositiveInt = 4096
    """Upper bound on the tokens packed into one micro-batch; a longer sequence gets a micro-batch of its own."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation, as in Megatron-Core."""


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
