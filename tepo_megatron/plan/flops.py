"""Counts the FLOPs of a token: forward, and what the backward pass computes again."""

from __future__ import annotations

from tepo_megatron.config import RunConfig
from tepo_megatron.plan.activations import passed_width
from tepo_megatron.plan.shapes import active_parameters
from tepo_megatron.weights.architecture import ModelSpec


def forward_flops(spec: ModelSpec, mean_length: float) -> float:
    """FLOPs of one token's forward pass: 2 per weight of every matrix that it meets, and causal attention.

    The embedding is a lookup and costs nothing; of the experts only the chosen ones count.
    """
    matrices = active_parameters(spec) - (0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size)
    # Attention: 2 FLOPs × 2 products (scores, values) × half of the sequence on average, since it is causal.
    return 2 * matrices + 2 * spec.num_layers * spec.num_heads * spec.head_dim * mean_length


def recomputed_flops(spec: ModelSpec, config: RunConfig, mean_length: float) -> float:
    """FLOPs of one token that the backward pass computes again."""
    again, head = set(config.engine.recomputed), 2 * spec.vocab_size * spec.hidden_size
    fused_head = head if config.engine.head == "fused" else 0
    if config.engine.recompute == "full":
        return forward_flops(spec, mean_length) - head + fused_head
    attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * mean_length if "core_attn" in again else 0
    mlp = 2 * spec.num_layers * 3 * spec.hidden_size * passed_width(spec) if again & {"mlp", "moe"} else 0
    return attention + mlp + fused_head
