"""Small random models of every architecture that vLLM serves on a CPU, and what transformers decodes with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from tepo_megatron.weights.architecture import is_always_fp32

PROMPTS = [(1, 5, 6, 7), (1, 9), (1, 30, 31, 32, 33, 34, 35), (1,), (1, 60, 4)]
EOS, LENGTH = 2, 12
VOCABULARY = 61
"""No multiple of TP, nor of what vLLM pads to."""

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's attention on the CPU takes
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"rope_parameters": LLAMA3_ROPE},
    "Llama-tied": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": None},
    "Qwen2": {"hidden_size": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "Qwen2-tied": {"hidden_size": 128, "tie_word_embeddings": True},
    "Qwen3": {},
    "Qwen3-tied": {"tie_word_embeddings": True},
    "Mixtral": {"hidden_size": 64, "num_local_experts": 4},
    "Qwen3Moe": {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3},
    "Glm4Moe": {
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
    },
}
"""What sets each model apart; the family is the name up to the dash. Qwen2's head size is hidden size / heads; vLLM's experts
on the CPU take hidden sizes in multiples of 32, and here pad Mixtral's MLPs to such a multiple, but not Qwen3's.
"""


def random_family(family: str, settings: Mapping[str, Any], *, seed: int = 0, scale: float = 0.12) -> Any:
    """A model of transformers without a weight at 0 or 1, as it leaves biases and norms: one that is lost must show."""
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**settings)).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(scale * torch.randn_like(param) + (param.dim() == 1))
        for name, buffer in model.named_buffers():
            if is_always_fp32(name):
                buffer.copy_(0.05 * torch.randn_like(buffer))  # so that they change the choice
    return model


@cache
def random_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """One of ``MODELS``."""
    return random_family(name.split("-")[0], {**_SIZES, **MODELS[name], **changes}, seed=seed)


@torch.no_grad()
def greedy_after(model: Any, prompt: Sequence[int], length: int) -> list[int]:
    """The most probable tokens after a prompt, ``length`` of them or up to ``EOS``."""
    ids = list(prompt)
    while len(ids) < len(prompt) + length and (len(ids) == len(prompt) or ids[-1] != EOS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@cache
def greedy(name: str, seed: int) -> list[list[int]]:
    """After each of ``PROMPTS``."""
    return [greedy_after(random_model(name, seed), prompt, LENGTH) for prompt in PROMPTS]
