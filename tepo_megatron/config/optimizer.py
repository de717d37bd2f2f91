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
"""Half of the largest relative step between two numbers of a dtype. A running mean that loses no more than this part of itself
in an optimizer step may be rounded back to where it was, for ever."""


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-6
    """Adam's learning rate after the warm-up. The default suits models of billions of parameters; the tiny example, with 0.6
    million, trains at 5e-5."""

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0 to ``lr``; a step of the run has ``train.minibatches``
    of them."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: ``constant``, or a line or half cosine down to ``min_lr`` at the last optimizer step of
    the run."""

    min_lr: float = Field(default=0.0, ge=0)
    """Final learning rate of ``linear`` and ``cosine``; at most ``lr``."""

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay per optimizer step of Adam's running means of the gradient and of its square. 0.95 instead of Adam's 0.999 is usual
    for language models: the mean square follows a change within 20 steps, not 1000."""

    eps: PositiveFloat = 1e-8
    """Adam's ε, added to the root of the mean square before the division."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay (AdamW): each step subtracts ``lr`` × this × the weight; norms and biases are left out. 0 by
    default, since a run of RL is short and starts from a trained model."""

    clip_grad: float = Field(default=1.0, ge=0)
    """Largest norm of the gradient over all weights; a larger gradient is scaled down to it. 0: no clipping."""

    distributed: bool = False
    """Shard the optimizer's states (fp32 weights and both means) over the data- and context-parallel ranks: Megatron's
    distributed optimizer. Saves memory if ``engine.parallel.dp`` × ``cp`` is more than 1; the fields below need it in any
    case."""

    exp_avg_dtype: MomentDtype = "float32"
    """Dtype of Adam's running mean of the gradient between steps: Megatron's precision-aware optimizer. A step computes in
    fp32. Needs a GPU and Transformer Engine. Not run on a GPU yet."""

    exp_avg_sq_dtype: MomentDtype = "float32"
    """The same for the running mean of its square."""

    store_param_remainders: bool = False
    """Store of each fp32 weight only the 16 bits that its bfloat16 weight lacks: 2 bytes instead of 4, and the same values.
    Needs a GPU and Transformer Engine. Not run on a GPU yet."""

    offload_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the weights whose optimizer states (fp32 weight and both means) are in the host's memory, where Adam then
    computes: Megatron's hybrid optimizer. Costs the host 16 bytes a weight, and a step the transfer of gradient and new weight.
    Not run on a GPU yet."""

    @property
    def precision_aware(self) -> bool:
        """Whether Transformer Engine's Adam keeps states in fewer bits than fp32."""
        return self.store_param_remainders or (self.exp_avg_dtype, self.exp_avg_sq_dtype) != ("float32", "float32")

    @property
    def own_masters(self) -> bool:
        """Whether the fp32 weights are in Adam itself, and not beside it in Megatron's optimizer."""
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
        """The fields that ask for states in fewer bits than fp32."""
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
