"""``optimizer``: Adam and its schedule."""

from typing import Literal

from pydantic import Field, PositiveFloat

from tepo_megatron.config.base import Section


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
