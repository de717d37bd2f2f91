"""Bytes that a layer keeps for its backward pass, and padding of micro-batches. Formulas: docs/reference/plan.md."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from tepo_megatron.config import RunConfig
from tepo_megatron.plan.shapes import expert_tp
from tepo_megatron.weights.architecture import ModelSpec

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}

NORM_COPIES = {"te": 2, "local": 3}
"""Input and output, with torch also the normalised input."""


FP8_TOKENS = {"none": 1, "delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}
"""A rank's tokens in FP8 layers must be a multiple of this."""


def platform_of(config: RunConfig) -> str:
    """Treats ``auto`` as a GPU."""
    return "cpu" if config.engine.platform == "cpu" else "cuda"


def layers_of(config: RunConfig) -> str:
    """Returns ``te`` or ``local``."""
    return "te" if platform_of(config) == "cuda" and config.engine.layers != "local" else "local"


def chosen_mlps(spec: ModelSpec) -> int:
    return spec.experts.per_token if spec.experts else 1


def passed_width(spec: ModelSpec) -> int:
    """Sums the widths of the MLPs that a token passes in a layer."""
    return chosen_mlps(spec) * spec.ffn_size + (spec.experts.shared_ffn_size if spec.experts else 0)


def layer_activations(spec: ModelSpec, config: RunConfig) -> Mapping[str, float]:
    """Returns bytes per token; recomputed modules keep their inputs."""
    return _activations_without(spec, config, config.engine.recomputed)


def recomputed_activations(spec: ModelSpec, config: RunConfig) -> float:
    """Returns bytes per token, alive for one layer at a time."""
    return sum(_activations_without(spec, config, ()).values()) - sum(layer_activations(spec, config).values())


def _activations_without(spec: ModelSpec, config: RunConfig, again: Collection[str]) -> Mapping[str, float]:
    parallel, b = config.engine.parallel, ELEMENT_BYTES[config.model.dtype]
    t, s = parallel.tp, parallel.tp if parallel.sequence_parallel else 1
    q, k = spec.num_heads * spec.head_dim / t, spec.num_kv_heads * spec.head_dim / t
    residual, mlp = spec.hidden_size / s, passed_width(spec) / t
    local = layers_of(config) == "local"
    attention_again, mlp_again = "core_attn" in again, "mlp" in again or "moe" in again
    as_rows = local and not attention_again  # trainer/megatron/model/attention_cpu.py
    # Transformer Engine has the norm of a dense MLP within it, and discards the output of the norm before experts.
    norm_again = "layernorm" in again or (not local and "mlp" in again)
    return {
        "norms": b * residual * (2 * NORM_COPIES[layers_of(config)] - norm_again),
        # fused qkv, and rotated q and k; as rows: q, k and v, with k and v repeated for every query head, and those of all
        # context-parallel ranks
        "attention inputs": b * q * (1 + 2 * parallel.cp) if as_rows else b * (q + 2 * k + q + k),
        "attention output": b * q * (2 if as_rows else 1),
        "log-sum-exp": 0 if attention_again else 4 * spec.num_heads / t,
        "rotation": b * 4 * spec.head_dim,
        "gate and up": 0 if mlp_again else b * 2 * mlp,
        # fused: the product alone
        "activated gate, offset up, product": 0 if mlp_again or "moe_act" in again else b * (3 if local else 1) * mlp,
        **({} if "moe" in again else _routing(spec, config)),
    }


def _routing(spec: ModelSpec, config: RunConfig) -> Mapping[str, float]:
    """Assumes that all experts get equally many tokens."""
    if spec.experts is None:
        return {}
    parallel, b = config.engine.parallel, ELEMENT_BYTES[config.model.dtype]
    inputs = spec.experts.per_token * expert_tp(parallel) * spec.hidden_size
    local = layers_of(config) == "local"
    return {
        "experts' inputs": b * inputs / parallel.tp,
        # logits, probabilities of all and of the chosen, in fp32; trainer/megatron/model/experts.py's router also its input
        "router": 4 * (3 * spec.experts.count + (spec.hidden_size if local else 0)) / parallel.tp,
        # in the experts' MLP: the factor of the probability
        "weighted product": b * spec.experts.per_token * spec.ffn_size / parallel.tp if local else 0,
    }


def token_multiple(config: RunConfig) -> int:
    """Applies to the tokens of all context-parallel ranks together."""
    parallel = config.engine.parallel
    share = (parallel.tp if parallel.sequence_parallel else 1) * FP8_TOKENS[config.engine.fp8.recipe]
    return parallel.cp * math.lcm(2, share) if parallel.cp > 1 else share


def padded_tokens(config: RunConfig, tokens: int) -> int:
    multiple = token_multiple(config)
    return -(-tokens // multiple) * multiple


def padding_share(config: RunConfig, mean_length: float) -> float:
    """Assumes half a multiple per micro-batch, and cp tokens per sequence if cp > 1."""
    parallel = config.engine.parallel
    of_sequences = (2 * parallel.cp - 1) / 2 / mean_length if parallel.cp > 1 else 0.0
    tokens = max(config.engine.micro_batch_tokens, mean_length)
    return of_sequences + (token_multiple(config) - 1) / 2 / tokens
