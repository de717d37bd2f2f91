"""A small random Llama as a Hugging Face folder, and rollouts for it, without transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.weights.architecture import model_spec
from tepo_megatron.weights.table import tensor_shapes
from tests.support.random_models import VOCABULARY


def llama_config(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    other = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "tie_word_embeddings": False}
    return {"architectures": ["LlamaForCausalLM"], **sizes, **heads, **other, **changes}


def write_llama(folder: Path, *, scale: float = 0.2, spike: float = 500.0, **changes: Any) -> Path:
    """Weights from a normal distribution of this scale; the embedding of token 0 is a single ``spike``, with larger
    activations than those of any other token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, generator = llama_config(**changes), torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else scale * torch.randn(shape, generator=generator)
        for name, shape in tensor_shapes(model_spec(config, "test")).items()
    }
    tensors["model.embed_tokens.weight"][0] = torch.eye(1, config["hidden_size"])[0] * spike
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def draw_rollouts(lengths: Sequence[int], *, seed: int = 1) -> list[Rollout]:
    """One group; prompts of two tokens, none of them token 0, and rewards 0 and 1 in turn."""
    generator = torch.Generator().manual_seed(seed)
    rollouts = []
    for number, length in enumerate(lengths):
        ids = tuple(torch.randint(1, VOCABULARY, (length,), generator=generator).tolist())
        logprobs, version = (-1.0,) * (length - 2), WeightsVersion(0)
        rollouts.append(Rollout("p", 0, ids[:2], ids[2:], logprobs, "stop", version, reward=float(number % 2)))
    return rollouts
