"""``optimizer``: Adam and its schedule."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from tepo_megatron.config.base import Section

Decay = Annotated[float, Field(ge=0, lt=1)]
MomentDtype = Literal["float32", "bfloat16", "float16", "fp8"]

STALLS_AT: Mapping[MomentDtype, float] = MappingProxyType(
    {"float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11, "fp8": 2**-4}
)
"""Half of a dtype's largest relative step. A running mean that loses no more of itself per optimizer step may be rounded back,
for ever."""


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-6
    """Adam's learning rate after the warm-up. The default suits billions of parameters; the tiny example (0.6 million) uses
    5e-5."""

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear rise from 0 to ``lr``; a step of the run has ``train.minibatches``."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: ``constant``, or a line or half cosine down to ``min_lr`` at the run's last optimizer
    step."""

    min_lr: float = Field(default=0.0, ge=0)
    """Final learning rate of ``linear`` and ``cosine``; at most ``lr``."""

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay per optimizer step of Adam's means of the gradient and its square. 0.95 is usual for language models: the mean
    square follows within 20 steps, with 0.999 within 1000."""

    eps: PositiveFloat = 1e-8
    """Adam's ε, added to the root of the mean square."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay (AdamW): a step subtracts ``lr`` × this × the weight, but not from norms and biases. 0, since RL
    is short and starts from a trained model."""

    clip_grad: float = Field(default=1.0, ge=0)
    """Largest norm of the gradient over all weights; larger ones are scaled down. 0: no clipping."""

    distributed: bool = False
    """Shard optimizer states (fp32 weights, both means) over data- and context-parallel ranks: Megatron's distributed
    optimizer. Saves memory if ``engine.parallel.dp`` × ``cp`` > 1; the fields below always need it."""

    exp_avg_dtype: MomentDtype = "float32"
    """Dtype of Adam's mean gradient between steps: Megatron's precision-aware optimizer, which computes in fp32. Needs a GPU
    and Transformer Engine. Not run on a GPU yet."""

    exp_avg_sq_dtype: MomentDtype = "float32"
    """The same for the mean square."""

    store_param_remainders: bool = False
    """Store only the 16 bits of each fp32 weight that its bfloat16 weight lacks: 2 bytes instead of 4, same values. Needs a GPU
    and Transformer Engine. Not run on a GPU yet."""

    offload_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of weights with optimizer states in host memory, where Adam then computes: Megatron's hybrid optimizer. Costs 16
    host bytes a weight, and transfers of gradient and new weight each step. Not run on a GPU yet."""

    @property
    def precision_aware(self) -> bool:
        """Whether Transformer Engine's Adam keeps states below fp32."""
        return self.store_param_remainders or (self.exp_avg_dtype, self.exp_avg_sq_dtype) != ("float32", "float32")

    @property
    def own_masters(self) -> bool:
        """Whether fp32 weights are in Adam itself, not in Megatron's optimizer."""
        return self.precision_aware or self.offload_fraction > 0

    @model_validator(mode="after")
    def _the_schedule_falls(self) -> "OptimizerConfig":
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr:g} is more than lr = {self.lr:g}; lower min_lr, or raise lr")
        return self

    @model_validator(mode="after")
    def _lean_states_have_what_they_need(self) -> "OptimizerConfig":
        if not self.own_masters:
            return self
        name = "offload_fraction" if self.offload_fraction else self.reduced_fields[0]
        if not self.distributed:
            raise ValueError(
                f"{name} = {getattr(self, name)} needs optimizer.distributed = true, also where dp × cp is 1: only "
                f"Megatron's distributed optimizer leaves the fp32 weights to Adam; set it, or leave {name} out"
            )
        if self.offload_fraction and self.precision_aware:
            raise ValueError(
                f"{self.reduced_fields[0]} with offload_fraction = {self.offload_fraction:g}: Megatron's optimizer on the host "
                "keeps all states in fp32, and would take no notice; leave one of them out"
            )
        return self

    @property
    def reduced_fields(self) -> tuple[str, ...]:
        """Fields that ask for states below fp32."""
        dtypes = [name for name in ("exp_avg_dtype", "exp_avg_sq_dtype") if getattr(self, name) != "float32"]
        return (*dtypes, *(["store_param_remainders"] if self.store_param_remainders else []))

    @model_validator(mode="after")
    def _means_can_move(self) -> "OptimizerConfig":
        for number, name in enumerate(("exp_avg_dtype", "exp_avg_sq_dtype")):
            dtype: MomentDtype = getattr(self, name)
            lost = 1 - self.betas[number]
            if dtype != "float32" and lost <= STALLS_AT[dtype]:
                raise ValueError(
                    f"{name} = {dtype} with betas[{number}] = {self.betas[number]:g}: a step takes {lost:.2g} of the mean, and "
                    f"{dtype} rounds what is up to {STALLS_AT[dtype]:.2g} away back to it, so that the mean would never fall; "
                    f"set {name} to more bits, or betas[{number}] below {1 - STALLS_AT[dtype]:g}"
                )
        return self
