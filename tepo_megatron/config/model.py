"""``model``: the model to train."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from tepo_megatron.config.base import Section

ALL_LINEAR = "all-linear"


class LoraConfig(Section):
    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Inner dimension of an adapter: A is [rank, in], B is [out, rank]. More learns more and costs memory; 8 to 32 is usual for
    RL."""

    alpha: Annotated[float, Field(gt=0)] = 32.0
    """An adapter adds alpha / rank · B · A to its weight. Twice the rank is usual."""

    rslora: bool = False
    """Divide alpha by the square root of the rank instead: keeps the size of updates at high ranks."""

    dropout: float = 0.0
    """Must be 0: training draws no random numbers, so that scores can be repeated. The field only refuses copied settings."""

    target_modules: tuple[Annotated[str, Field(min_length=1)], ...] = (ALL_LINEAR,)
    """Layers with adapters, by Hugging Face names: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj (of every
    expert too; w1, w2, w3 in Mixtral). ``all-linear``: all of them. Embedding, head, norms and router have none."""

    path: Path | None = None
    """PEFT folder (adapter_config.json, adapter_model.safetensors) of adapters to train further. None: A from the seed and B =
    0, so that training starts from the model itself."""

    serve: Literal["merged", "adapter"] = "merged"
    """What servers receive. ``merged``: weights with adapters added, rounded as the trainer's. ``adapter``: only A and B,
    applied next to the weights of ``model.path``: fewer bytes. Equal in float32; bfloat16 rounds differently. For dense models
    up to rank 512, with servers on other GPUs or a CPU. Not run on a GPU yet."""

    @property
    def scale(self) -> float:
        """The factor of B · A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, dropout: float) -> float:
        if dropout != 0:
            raise ValueError(
                "dropout must be 0: nothing in a training step draws random numbers, so that log-probs can be computed twice "
                "and compared; leave model.lora.dropout out"
            )
        return dropout

    @model_validator(mode="after")
    def _targets_are_named_once(self) -> "LoraConfig":
        names = self.target_modules
        if not names:
            raise ValueError("model.lora.target_modules is empty, so that nothing would be trained; name layers, or all-linear")
        if len(set(names)) < len(names):
            raise ValueError(f"model.lora.target_modules names a layer twice: {', '.join(names)}; name each once")
        if ALL_LINEAR in names and len(names) > 1:
            raise ValueError("model.lora.target_modules: all-linear already means every layer; leave the other names out")
        return self


class ModelConfig(Section):
    path: str = "builtin:tiny"
    """Hugging Face folder with config.json, safetensors and tokenizer; ``builtin:tiny`` is this package's warm start."""

    shards: Path | None = None
    """Folder that ``tepo import`` wrote from ``path``, from which trainer ranks read their shards. Config, tokenizer and
    servers' weights still come from ``path``."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and activations in the trainer and, by default, in the servers."""

    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights, which then need no gradients or optimizer states. None: all weights."""
