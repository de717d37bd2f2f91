"""Chooses Transformer Engine's layers or Megatron-Core's own, before any process group."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import transformer_block
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from tepo_megatron.config import EngineConfig
from tepo_megatron.trainer.megatron.model.attention_cpu import PackedDotProductAttention
from tepo_megatron.trainer.megatron.model.experts import Float32Router
from tepo_megatron.trainer.megatron.model.fp8 import ask_transformer_engine, check_gpu
from tepo_megatron.trainer.megatron.platform.gpu import INSTALL_TE, NO_PACKAGES, Packages, installed_packages
from tepo_megatron.trainer.megatron.platform.platform import Platform


@dataclass(frozen=True)
class Layers:
    kind: Literal["te", "local"]
    packages: Packages = NO_PACKAGES

    @property
    def fused_norms(self) -> bool:
        """The weights of two norms are then inside the linears that follow."""
        return self.kind == "te"


LOCAL = Layers("local")


def choose_layers(config: EngineConfig, platform: Platform) -> Layers:
    """Raises RuntimeError if a needed Transformer Engine cannot be imported, ValueError for a missing or unsuitable GPU."""
    packages = installed_packages()
    problem = import_problem() if platform.kind == "cuda" and config.layers != "local" else None
    layers = Layers(decide(config, platform.kind, problem), packages)
    if layers.kind == "te":
        capability = torch.cuda.get_device_capability(platform.device)
        check_gpu(config.fp8, capability=capability, te=packages.te or "0", cuda=torch.version.cuda or "0")
        ask_transformer_engine(config.fp8)
    return layers


def decide(config: EngineConfig, platform: Literal["cpu", "cuda"], te_problem: str | None) -> Literal["te", "local"]:
    """``te_problem`` is from :func:`import_problem`. Raises as :func:`choose_layers`."""
    if platform == "cpu":
        for asked, name in ((config.layers == "te", "engine.layers = te"), (config.fp8.enabled, "engine.fp8")):
            if asked:
                raise ValueError(
                    f"{name} is for Transformer Engine's layers, which need a GPU, and the trainer runs on a CPU; set "
                    "engine.layers=local and engine.fp8.recipe=none"
                )
        if config.parallel.cp_comm_type != "p2p":
            raise ValueError(
                f"engine.parallel.cp_comm_type = {config.parallel.cp_comm_type} is for Transformer Engine's attention, which "
                "needs a GPU, and the trainer runs on a CPU, where keys and values are gathered; unset it"
            )
        return "local"
    if config.layers == "local":
        return "local"
    if te_problem is not None:
        meaning = "engine.layers = te" if config.layers == "te" else "engine.layers = auto means Transformer Engine on a GPU"
        raise RuntimeError(
            f"{meaning}, but transformer_engine.pytorch cannot be imported ({te_problem}); install it ({INSTALL_TE}), or set "
            "engine.layers=local"
        )
    return "te"


def import_problem() -> str | None:
    """Megatron-Core hides a failed import; a wrong build fails with more than ImportError."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def kernel_options(layers: Layers) -> dict[str, Any]:
    """Fusions stay off for what the model lacks: masked softmax outside Transformer Engine, bias, dropout."""
    te = layers.kind == "te"
    return {
        "bias_activation_fusion": te,  # SwiGLU keeps only its input for the backward pass; compiled by torch
        "apply_rope_fusion": te,  # one kernel for all packed sequences
        "gradient_accumulation_fusion": te and layers.packages.wgrad,
        "persist_layer_norm": te,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
    }


class RMSNorm(torch.nn.RMSNorm):
    """Sequence parallelism needs the weight marked."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def layer_spec(
    config: TransformerConfig, layers: Layers, vp_stage: int | None = None
) -> ModuleSpec | TransformerBlockSubmodules:
    """``vp_stage``: index of the model chunk, if stages are interleaved."""
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
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _local_layer(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    layer: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=num_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if num_experts is not None:
        layer.submodules.mlp.submodules.router = Float32Router
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedDotProductAttention
    if config.qk_layernorm:
        # Its gradient, a share on each tensor-parallel rank, is summed by Megatron because of the parameter's name.
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer
