"""Small random models of every architecture that vLLM serves on a CPU, and what transformers decodes with them."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tepo_megatron.core.rollout import Response, Rollout, WeightsVersion
from tepo_megatron.weights.architecture import ModelSpec, is_always_fp32
from tepo_megatron.weights.table import tensor_shapes

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
    return [greedy_after(random_model(name, seed), prompt, LENGTH) for prompt in PROMPTS]


def write_llama(folder: Path, *, scale: float = 0.2, spike: float = 500.0, **changes: Any) -> Path:
    """Weights from a normal distribution of this scale; the embedding of token 0 is a single ``spike``, with larger
    activations than those of any other token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    other = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "tie_word_embeddings": False}
    config = {"architectures": ["LlamaForCausalLM"], **sizes, **heads, **other, **changes}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else scale * torch.randn(shape, generator=generator)
        for name, shape in tensor_shapes(ModelSpec.of(config, "test")).items()
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


def rollouts_of(groups: Sequence[Sequence[Response]], prompts: Sequence[Sequence[int]]) -> list[Rollout]:
    """The responses of a group for each prompt, with rewards 0 and 1 in turn."""
    return [
        Rollout.of(response, problem_id=f"p{group}", group=group, prompt_ids=prompts[group], text="", reward=float(number % 2))
        for group, responses in enumerate(groups)
        for number, response in enumerate(responses)
    ]
