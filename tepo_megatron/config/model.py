"""``model``: the model that is trained."""

from pathlib import Path
from typing import Literal

from tepo_megatron.config.base import Section
from tepo_megatron.config.lora import LoraConfig


class ModelConfig(Section):
    path: str = "builtin:tiny"
    """Hugging Face folder with config.json, safetensors and tokenizer; ``builtin:tiny`` is the warm start in this package."""

    shards: Path | None = None
    """Folder that ``tepo import`` wrote from ``path``: each rank of the trainer reads its shard there. Config, tokenizer and
    the servers' weights still come from ``path``."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """What weights and activations are kept in, in the trainer and (unless overridden there) in the rollout server."""

    lora: LoraConfig | None = None
    """Trains low-rank adapters instead of the weights, which then need neither gradients nor optimizer states.
    None: all weights are trained."""
