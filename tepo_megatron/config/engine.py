"""The trainer: which model, how it is split over ranks, how it is optimised."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tepo_megatron.config.base import Section


class ModelConfig(Section):
    path: str = "builtin:tiny"
    """Hugging Face folder with config.json, safetensors and tokenizer; ``builtin:tiny`` is the warm start in this package."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """What weights and activations are kept in, in the trainer and (unless overridden there) in the rollout server."""


class ParallelConfig(Section):
    tp: PositiveInt = 1
    """Tensor-parallel size: heads, MLP and vocabulary are split over so many ranks."""

    pp: PositiveInt = 1
    """Pipeline-parallel size: layers are split over so many stages."""

    dp: PositiveInt = 1
    """Data-parallel size. The world is tp × pp × dp processes."""

    sequence_parallel: bool = False
    """Split activations outside attention and MLP over the tensor-parallel ranks (Megatron's SP)."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @model_validator(mode="after")
    def _sequence_parallel_needs_tp(self) -> "ParallelConfig":
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel = true needs tp > 1; set tp, or sequence_parallel = false")
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
