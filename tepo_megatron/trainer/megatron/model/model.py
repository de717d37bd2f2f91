"""Builds this rank's part of a Megatron GPTModel from a Hugging Face spec."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from tepo_megatron.config import EngineConfig, ModelConfig, ParallelConfig
from tepo_megatron.trainer.megatron.model import fp8
from tepo_megatron.trainer.megatron.model.experts import moe_options, one_length
from tepo_megatron.trainer.megatron.model.layers import Layers, kernel_options, layer_spec
from tepo_megatron.trainer.megatron.platform.parallel import Ranks
from tepo_megatron.trainer.megatron.platform.platform import Platform
from tepo_megatron.weights.architecture import ModelSpec


def transformer_config(
    spec: ModelSpec, model: ModelConfig, engine: EngineConfig, platform: Platform, layers: Layers
) -> TransformerConfig:
    """Switches loss scaling off (``step/update.py``)."""
    dtype = getattr(torch, model.dtype)
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.dense_ffn_size or spec.ffn_size,
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
        **_stage_options(engine.parallel),
        context_parallel_size=engine.parallel.cp,
        cp_comm_type=engine.parallel.cp_comm_type,
        sequence_parallel=engine.parallel.sequence_parallel,
        pipeline_dtype=dtype,
        variable_seq_lengths=engine.parallel.pp > 1 and not one_length(spec, engine.parallel, platform),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The random weights are overwritten, but drawing them is where Megatron marks which parameters are tensor-parallel.
        perform_initialization=True,
        use_cpu_initialization=platform.kind == "cpu",
        calculate_per_token_loss=True,  # Megatron sums and does not divide: step/update.py
        **_recompute_options(engine),
        # Or else the host waits for the whole GPU after each exchange between stages, as a torch older than ours needs.
        batch_p2p_sync=False,
        **kernel_options(layers),
        **fp8.layer_options(engine.fp8),
        **moe_options(spec, engine, platform, grouped=layers.kind == "te"),
    )


def _recompute_options(engine: EngineConfig) -> dict[str, Any]:
    if engine.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    modules = list(engine.recomputed)
    return {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}


@torch.no_grad()  # or else Transformer Engine keeps the random weights of FP8 parameters, to make masters of
def build_model(
    spec: ModelSpec,
    config: TransformerConfig,
    ranks: Ranks,
    layers: Layers,
    chunk: int = 0,
    *,
    head: Literal["logits", "fused"] = "logits",
) -> GPTModel:
    """Builds a chunk without loading weights.

    Every rank calls for each of its ``ranks.vpp`` chunks in order: the ends of the pipeline exchange a tied embedding.
    """
    vp_stage = chunk if ranks.vpp > 1 else None
    model = GPTModel(
        config,
        layer_spec(config, layers, vp_stage),
        vocab_size=spec.padded_vocab_size(ranks.tp),
        max_sequence_length=spec.max_positions,
        pre_process=ranks.is_first_stage and chunk == 0,
        post_process=ranks.is_last_stage and chunk == ranks.vpp - 1,
        vp_stage=vp_stage,
        share_embeddings_and_output_weights=spec.tied_embeddings,
        position_embedding_type="rope",
        rotary_percent=spec.rotary_fraction,
        rotary_base=spec.rope_theta,
        rope_scaling=spec.rope_scaling is not None,
        rope_scaling_factor=spec.rope_scaling.factor if spec.rope_scaling else 1.0,
        parallel_output=True,
    )
    if head == "fused":
        _fuse_head(model)
    return model


class _FusedHead(torch.nn.Module):
    """The scores compute the product with the weight (``core/scores/fused_linear.py``).

    ``weight`` is None if the head is tied to an embedding of the same rank.
    """

    def __init__(self, output_layer: torch.nn.Module) -> None:
        super().__init__()
        self.register_parameter("weight", output_layer.weight)  # type: ignore[arg-type] # a parameter or None
        self.sequence_parallel = bool(output_layer.sequence_parallel)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Returns ``input_`` [T, 1, H] ([T/tp, 1, H] under sequence parallelism)."""
        return input_, None


class HeadWeight(NamedTuple):
    weight_VpH: Tensor
    """This rank's rows of the head or of the tied embedding."""

    sequence_parallel: bool
    """Whether hidden states are this rank's share of the tokens."""


def _fuse_head(model: GPTModel) -> None:
    if model.post_process:
        model.output_layer = _FusedHead(model.output_layer)


def fused_head(model: torch.nn.Module) -> HeadWeight | None:
    """Returns None if the last stage's model returns logits."""
    gpt: Any = unwrap_model(model)
    head = gpt.output_layer
    if not isinstance(head, _FusedHead):
        return None
    tied = gpt.share_embeddings_and_output_weights
    weight: Any = gpt.shared_embedding_or_output_weight() if tied else head.weight
    return HeadWeight(weight, head.sequence_parallel)


def _stage_options(parallel: ParallelConfig) -> dict[str, Any]:
    """With two interleaved stages, batched exchanges (Megatron's default) would confuse an activation with a gradient."""
    interleaved = parallel.vpp > 1
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    if parallel.pp == 2 and first is not None:
        last = None  # it has the rest; with both numbers Megatron would divide by the stages between: 0
    return {
        "virtual_pipeline_model_parallel_size": parallel.vpp if interleaved else None,
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }
