"""``optimizer``: Adam and its schedule."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from tepo_megatron.config.base import Section

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-6
    """Learning rate of Adam after the warm-up: roughly how far one step moves a weight. The default suits models of billions of
    parameters; the tiny example, with 0.6 million, trains at 5e-5."""

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0 to ``lr``; a rollout batch has ``train.minibatches``
    of them."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up: it stays (``constant``), or falls along a line or a half cosine to
    ``min_lr``, which it reaches at the last optimizer step of the run."""

    min_lr: float = Field(default=0.0, ge=0)
    """The learning rate at which ``linear`` and ``cosine`` end; at most ``lr``."""

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay per optimizer step of Adam's running means of the gradient and of its square. 0.95 rather than Adam's 0.999 is
    usual for language models: the mean square follows a change within 20 steps, not 1000."""

    eps: PositiveFloat = 1e-8
    """Adam's ε, which is added to the root of the mean square before the division, so that it is never by 0."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay (AdamW): each step takes the part ``lr`` × this off a weight; norms and biases are left out. 0 by
    default, since a run of RL is short and starts from a trained model."""

    clip_grad: float = Field(default=1.0, ge=0)
    """Largest norm of the gradient over all weights; a larger gradient is scaled down to it. 0: no clipping."""

    distributed: bool = False
    """Shard the optimizer's states (fp32 weights and both means) over the data- and context-parallel ranks: Megatron's
    distributed optimizer. It saves memory where ``engine.parallel.dp`` × ``cp`` is more than 1."""

    @model_validator(mode="after")
    def _the_schedule_falls(self) -> "OptimizerConfig":
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr:g} is more than lr = {self.lr:g}; lower min_lr, or raise lr")
        return self
