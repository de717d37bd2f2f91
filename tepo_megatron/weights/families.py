"""The families of models: what sets each apart, what its ``config.json`` means where it is silent, what is not supported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """The differences of one architecture from the plain decoder (RMSNorm, RoPE, grouped queries, SwiGLU, no biases).

    ``qkv_bias`` and ``qk_norm`` may name the field that says so. ``ffn_size`` names the field with the size of the MLP, or of
    each expert. ``shared``: the family's experts are those of DeepSeek-V3 (:class:`Experts`). ``rotary_fraction``: what RoPE
    turns of a head, where ``config.json`` does not say it. ``defaults`` are the values of fields that ``config.json`` leaves
    out. ``only`` lists fields of which one value is supported, so that no feature is silently ignored.
    """

    qkv_bias: bool | str = False
    qk_norm: bool | str = False
    experts: bool = False
    shared: bool = False
    ffn_size: str = "intermediate_size"
    rotary_fraction: float | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(only={"attention_bias": False, "mlp_bias": False}),
    "MistralForCausalLM": Family(
        defaults={"num_key_value_heads": 8, "sliding_window": 4096}, only={"sliding_window": None, "llama_4_scaling": None}
    ),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True,
        defaults={"num_key_value_heads": 32},
        only={"use_sliding_window": False, "dual_chunk_attention_config": None},
    ),
    "Qwen3ForCausalLM": Family(
        qk_norm=True,
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        only={"attention_bias": False, "use_sliding_window": False, "dual_chunk_attention_config": None},
    ),
    "MixtralForCausalLM": Family(
        experts=True,
        defaults={
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        only={"sliding_window": None, "norm_topk_prob": True, "router_jitter_noise": 0.0, "output_router_logits": False},
    ),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=True,
        experts=True,
        ffn_size="moe_intermediate_size",
        defaults={
            "num_key_value_heads": 4,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "moe_intermediate_size": 768,
        },
        only={
            "attention_bias": False,
            "use_sliding_window": False,
            "dual_chunk_attention_config": None,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
        },
    ),
    "Glm4MoeForCausalLM": Family(
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        experts=True,
        shared=True,
        ffn_size="moe_intermediate_size",
        rotary_fraction=0.5,
        defaults={
            "attention_bias": False,
            "use_qk_norm": False,
            "num_key_value_heads": 8,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
        },
        only={"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "output_router_logits": False},
    ),
}

KNOWN_ARCHITECTURES = tuple(FAMILIES)

PLAIN = {
    "hidden_act": "silu",
    # Logits are the head's product as it is. Other families scale, bound or shift them; vLLM reads the first for Llama too.
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "final_logit_softcapping": None,
    "lm_head_bias": False,
}
"""Fields that every family knows, or that a family's relatives know, with the one value that is supported."""

EXPERT_BIAS = "e_score_correction_bias"
"""The last part of the name of the tensor with the experts' biases."""


def kept_in_fp32(tensor: str) -> bool:
    """Whether a Hugging Face tensor is fp32 whatever ``model.dtype``: in the trainer, in servers and on disk."""
    return tensor.endswith(EXPERT_BIAS)
