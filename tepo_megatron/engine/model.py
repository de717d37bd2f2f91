"""From a Hugging Face spec to this rank's part of a Megatron GPTModel."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer import transformer_block
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from tepo_megatron.bridge.architecture import ModelSpec
from tepo_megatron.config import EngineConfig, ModelConfig
from tepo_megatron.engine.attention_cpu import PackedDotProductAttention
from tepo_megatron.engine.parallel import Ranks
from tepo_megatron.engine.platform import Platform


class RMSNorm(torch.nn.RMSNorm):
    """torch's norm in Megatron's place for one; marking the weight is all that sequence parallelism needs of it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def transformer_config(spec: ModelSpec, model: ModelConfig, engine: EngineConfig, platform: Platform) -> TransformerConfig:
    """Megatron's config of this model. Loss scaling is switched off here and explained in ``engine/step.py``."""
    dtype = getattr(torch, model.dtype)
    recompute_options: dict[str, dict[str, Any]] = {
        "none": {},
        "selective": {"recompute_granularity": "selective"},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn_size,
        layernorm_epsilon=spec.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=engine.parallel.tp,
        pipeline_model_parallel_size=engine.parallel.pp,
        sequence_parallel=engine.parallel.sequence_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The random weights are overwritten, but drawing them is where Megatron marks which parameters are tensor-parallel.
        perform_initialization=True,
        use_cpu_initialization=platform.kind == "cpu",
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=platform.kind == "cuda",
        **recompute_options[engine.recompute],
    )


def layer_spec(config: TransformerConfig, platform: Platform) -> ModuleSpec | TransformerBlockSubmodules:
    """Transformer Engine's layers on a GPU; Megatron's local ones, with our packed attention and norm, on a CPU."""
    if platform.kind == "cuda":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedDotProductAttention
    if config.qk_layernorm:
        # Its gradient, a share on each tensor-parallel rank, is summed by Megatron because of the parameter's name.
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    # The block spec, unlike the layer spec, names the final norm, which Megatron's local one would refuse under SP.
    layers = [layer] * transformer_block.get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def build_model(spec: ModelSpec, config: TransformerConfig, ranks: Ranks, platform: Platform) -> GPTModel:
    """This rank's part, with weights not yet loaded. Every rank calls (no communication)."""
    return GPTModel(
        config,
        layer_spec(config, platform),
        vocab_size=spec.padded_vocab_size(ranks.tp),
        max_sequence_length=spec.max_positions,
        pre_process=ranks.is_first_stage,
        post_process=ranks.is_last_stage,
        share_embeddings_and_output_weights=spec.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,
        rope_scaling=spec.rope_scaling is not None,
        rope_scaling_factor=spec.rope_scaling.factor if spec.rope_scaling else 1.0,
        parallel_output=True,
    )
