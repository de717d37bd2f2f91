"""Builds this rank's part of a Megatron GPTModel from a Hugging Face spec."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import transformer_block
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import unwrap_model
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import linear

from tepo_megatron.config import EngineConfig, ModelConfig, ParallelConfig
from tepo_megatron.trainer.megatron.gpu import INSTALL_TE, TRANSFORMER_ENGINE, Packages
from tepo_megatron.trainer.megatron.model import fp8
from tepo_megatron.trainer.megatron.model.attention_cpu import PackedDotProductAttention
from tepo_megatron.trainer.megatron.parallel.platform import Platform, Ranks
from tepo_megatron.weights.architecture import ModelSpec


def transformer_config(
    spec: ModelSpec, model: ModelConfig, engine: EngineConfig, platform: Platform, layers: Layers
) -> TransformerConfig:
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
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The random weights are overwritten, but drawing them is where Megatron marks which parameters are tensor-parallel.
        perform_initialization=True,
        use_cpu_initialization=platform.kind == "cpu",
        calculate_per_token_loss=True,  # Megatron sums and does not divide: update.py
        **_recompute_options(engine),
        # Or else the host waits for the whole GPU after each exchange between stages, as a torch older than ours needs.
        batch_p2p_sync=False,
        **layers.kernel_options,
        apply_rope_fusion=layers.kind == "te" or platform.kind == "cpu",  # all packed sequences at once
        **fp8.layer_options(engine.fp8),
        **_moe_options(spec, engine, platform, grouped=layers.kind == "te"),
    )


def _moe_options(spec: ModelSpec, engine: EngineConfig, platform: Platform, *, grouped: bool) -> dict[str, Any]:
    """Drops no token, as vLLM. ``grouped``: one matrix product for a rank's experts."""
    parallel, balance = engine.parallel, engine.moe_balance
    if spec.experts is None:
        # Nothing dispatches, but with its default Megatron refuses stages that exchange micro-batches of several lengths.
        return {"moe_token_dispatcher_type": "alltoall"}
    experts, biased = spec.experts, spec.experts.biased
    return {
        "num_moe_experts": experts.count,
        "moe_layer_freq": [int(spec.has_experts(layer)) for layer in range(spec.num_layers)],
        "moe_ffn_hidden_size": spec.ffn_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
        "moe_router_topk": experts.per_token,
        # A softmax over the chosen experts' logits alone is the softmax over all, renormalised to sum 1.
        "moe_router_pre_softmax": not experts.renormalize,
        "moe_router_score_function": "sigmoid" if biased else "softmax",
        "moe_router_topk_scaling_factor": experts.scale if biased else None,
        "moe_router_enable_expert_bias": biased,
        # With a rate of 0 the biases stay as the model has them.
        "moe_router_bias_update_rate": balance.update_rate if balance.kind == "expert_bias" else 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": grouped,
        # Megatron's all-to-all works on CUDA streams, and gathers unequal parts where gloo can only gather equal ones.
        "moe_token_dispatcher_type": "alltoall" if platform.kind == "cuda" else "allgather",
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.tp if parallel.etp is None else parallel.etp,
    }


def _recompute_options(engine: EngineConfig) -> dict[str, Any]:
    if engine.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    modules = list(engine.recomputed)
    return {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}


@torch.no_grad()  # or else Transformer Engine keeps the random weights of FP8 parameters, to make masters of
def build_model(
    spec: ModelSpec, config: TransformerConfig, ranks: Ranks, layers: Layers, chunk: int = 0, *, fused: bool = False
) -> GPTModel:
    """Loads no weights. Every rank calls for its chunks in order: tied embeddings are exchanged."""
    vp_stage = chunk if ranks.vpp > 1 else None
    model = _Model(
        config,
        _layer_spec(config, layers, vp_stage),
        vocab_size=spec.padded_vocab_size(ranks.tp),
        max_sequence_length=spec.max_positions,
        pre_process=ranks.pp_rank == 0 and chunk == 0,
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
    rotary = model.rotary_pos_emb
    rotary.forward = partial(inspect.unwrap(type(rotary).forward), rotary)  # its cache holds tables of 32 lengths on the GPU
    if fused and model.post_process:
        model.output_layer = _FusedHead(model.output_layer)
    for module in model.modules():
        if isinstance(module, TopKRouter) and not module.weight.is_meta:  # Megatron makes it in host memory
            module.to(torch.cuda.current_device())
    return model


class _Model(GPTModel):  # type: ignore[misc]  # Megatron's types are not followed
    def _set_attention_backend(self) -> None:
        """Transformer Engine reads a user's NVTE_FLASH_ATTN=0 itself; Megatron's refuses it."""


class _FusedHead(torch.nn.Module):
    """The scores compute the product with the weight, None for a tied embedding."""

    def __init__(self, output_layer: torch.nn.Module) -> None:
        super().__init__()
        self.register_parameter("weight", output_layer.weight)  # type: ignore[arg-type] # a parameter or None
        self.sequence_parallel = bool(output_layer.sequence_parallel)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Returns ``input_`` [T, 1, H] ([T/tp, 1, H] under sequence parallelism)."""
        return input_, None


def fused_head(model: torch.nn.Module) -> tuple[Tensor, bool] | None:
    """Returns the weight [V/tp, H], and whether hidden states are a share of the tokens."""
    gpt: Any = unwrap_model(model)
    head = gpt.output_layer
    if not isinstance(head, _FusedHead):
        return None
    tied = gpt.share_embeddings_and_output_weights
    weight: Any = gpt.shared_embedding_or_output_weight() if tied else head.weight
    return weight, head.sequence_parallel


def _stage_options(parallel: ParallelConfig) -> dict[str, Any]:
    # with two interleaved stages, batched exchanges (Megatron's default) would confuse an activation with a gradient
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


@dataclass(frozen=True)
class Layers:
    kind: Literal["te", "local"]
    packages: Packages = field(default_factory=Packages)

    @property
    def kernel_options(self) -> dict[str, Any]:
        # fusions stay off for what the model lacks: masked softmax outside Transformer Engine, bias, dropout
        return {
            "bias_activation_fusion": self.kind == "te",  # SwiGLU keeps only its input for the backward pass
            "gradient_accumulation_fusion": self.kind == "te" and self.packages.wgrad,
            "persist_layer_norm": self.kind == "te",
            "masked_softmax_fusion": False,
            "bias_dropout_fusion": False,
        }

    @classmethod
    def choose(cls, config: EngineConfig, platform: Platform, dtype: str) -> Layers:
        """Raises RuntimeError if a needed Transformer Engine cannot be imported, ValueError for an unsuitable GPU."""
        if platform.kind == "cpu":
            for fault in config.model_copy(update={"platform": "cpu"})._faults():
                raise ValueError(f"engine.{fault} (engine.platform = auto is cpu here)")
        if platform.kind == "cpu" or config.layers == "local":
            return cls("local", Packages.installed())
        if (problem := _import_problem()) is not None:
            meaning = (
                "engine.layers = te" if config.layers == "te" else "engine.layers = auto means Transformer Engine on a GPU"
            )
            raise RuntimeError(
                f"{meaning}, but transformer_engine.pytorch cannot be imported ({problem}); install it ({INSTALL_TE}), or set "
                "engine.layers=local"
            )
        packages = Packages.installed()
        capability = torch.cuda.get_device_capability(platform.device)
        fp8.check_gpu(config.fp8, capability=capability, te=packages.te or "0", cuda=torch.version.cuda or "0")
        fp8.ask_transformer_engine(config.fp8)
        if config.parallel.cp_comm_type == "a2a" and packages.te is not None and Version(packages.te) < Version("2.10"):
            raise ValueError(
                "engine.parallel.cp_comm_type = a2a exchanges packed sequences with Transformer Engine 2.10 or newer, and "
                f"{packages.te} is installed; upgrade it, or leave the field out"
            )
        _check_attention(dtype, capability, packages.te or "2.11", cp=config.parallel.cp)
        return cls("te", packages)


LOCAL = Layers("local")


def _check_attention(dtype: str, capability: tuple[int, int], te: str, *, cp: int) -> None:
    """Transformer Engine's choice for packed sequences, as 2.9 to 2.11 make it."""
    if dtype == "float32":
        raise ValueError(
            "model.dtype = float32, which Transformer Engine multiplies in TF32, coarser than the bounds on float32; "
            "set model.dtype = bfloat16, or engine.layers = local"
        )
    cudnn = capability >= (9, 0) and capability != (12, 0)
    if cudnn or importlib.util.find_spec("flash_attn") is not None:
        return
    reason = (
        f"this GPU has compute capability {capability[0]}.{capability[1]}, Transformer Engine takes cuDNN's attention for "
        "packed sequences from 9.0, except on 12.0, and flash-attn is not installed"
    )
    if cp > 1:
        raise ValueError(
            f"engine.parallel.cp = {cp} needs another attention: {reason}; install flash-attn, or set engine.parallel.cp to 1"
        )
    if Version(te) < Version("2.11"):
        raise ValueError(f"Transformer Engine {te} has no attention here: {reason}; upgrade to 2.11, or install flash-attn")
    warnings.warn(
        f"{reason}, so that the attention of a sequence of T tokens holds T × T scores; install flash-attn for long responses",
        stacklevel=3,
    )


def _import_problem() -> str | None:
    if TRANSFORMER_ENGINE.problem is not None:
        return TRANSFORMER_ENGINE.problem
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return None


class _RMSNorm(torch.nn.RMSNorm):
    """Sequence parallelism needs the weight marked."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _Float32Router(TopKRouter):  # type: ignore[misc]  # Megatron's types are not followed
    """Without Transformer Engine, Megatron's function raises NameError."""

    def gating(self, input: Tensor) -> Tensor:
        return linear(input.float(), self.weight.float())


def _layer_spec(config: TransformerConfig, layers: Layers, vp_stage: int | None) -> ModuleSpec | TransformerBlockSubmodules:
    sparse = config.moe_layer_freq if config.num_moe_experts is not None else [0] * config.num_layers
    if layers.kind == "te" and len(set(sparse)) > 1:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    if layers.kind == "te":
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
        )
    first = get_transformer_layer_offset(config, vp_stage)
    count = transformer_block.get_num_layers_to_build(config, vp_stage)
    dense, with_experts = (_local_layer(config, experts) for experts in (None, config.num_moe_experts))
    specs = [with_experts if sparse[layer] else dense for layer in range(first, first + count)]
    # The block spec, unlike the layer spec, names the final norm, which Megatron's local one would refuse under SP.
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=_RMSNorm)


def _local_layer(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    layer: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=num_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _RMSNorm
    if num_experts is not None:
        layer.submodules.mlp.submodules.router = _Float32Router
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedDotProductAttention
    if config.qk_layernorm:
        # Its gradient, a share on each tensor-parallel rank, is summed by Megatron because of the parameter's name.
        attention.q_layernorm = attention.k_layernorm = _RMSNorm
    return layer
