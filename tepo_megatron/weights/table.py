"""Hugging Face tensors, their parameters in Megatron-Core and vLLM, and a rank's boxes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from tepo_megatron.weights.architecture import EXPERT_BIAS, Experts, ModelSpec

SplitKind = Literal["replicated", "columns", "vocab", "gate", "up", "query", "key", "value"]

_Dimension = Literal["hidden", "heads", "kv_heads", "head", "ffn", "dense_ffn", "shared_ffn", "experts", "vocab"]
"""``heads`` and ``kv_heads`` are rows of all heads, ``head`` of one; ``ffn`` is an expert's."""

_Feature = Literal["qkv_bias", "qk_norm", "dense_mlp", "untied_head"]


@dataclass(frozen=True)
class ParamMapping:
    """Only models with ``feature`` have the tensor."""

    tensor: str
    megatron: str
    vllm: str
    split_kind: SplitKind
    shape: tuple[_Dimension, ...]
    feature: _Feature | None = None
    expert: int | None = None

    def applies(self, spec: ModelSpec, layer: int = 0) -> bool:
        has = {
            "qkv_bias": spec.qkv_bias,
            "qk_norm": spec.qk_norm,
            "dense_mlp": not spec.has_experts(layer),
            "untied_head": not spec.tied_embeddings,
        }
        return self.feature is None or has[self.feature]

    def within(self, block: str, megatron_block: str) -> ParamMapping:
        """vLLM's block is named as Hugging Face's."""
        tensor, megatron, vllm = f"{block}.{self.tensor}", f"{megatron_block}.{self.megatron}", f"{block}.{self.vllm}"
        return replace(self, tensor=tensor, megatron=megatron, vllm=vllm)

    def shape_in(self, spec: ModelSpec) -> tuple[int, ...]:
        sizes: dict[_Dimension, int] = {
            "hidden": spec.hidden_size,
            "heads": spec.num_heads * spec.head_dim,
            "kv_heads": spec.num_kv_heads * spec.head_dim,
            "head": spec.head_dim,
            "ffn": spec.ffn_size,
            "dense_ffn": spec.dense_ffn_size or spec.ffn_size,
            "shared_ffn": spec.experts.shared_ffn_size if spec.experts else 0,
            "experts": spec.experts.count if spec.experts else 0,
            "vocab": spec.vocab_size,
        }
        return tuple(sizes[dimension] for dimension in self.shape)


def _mlp(size: _Dimension, feature: _Feature | None = None) -> tuple[ParamMapping, ...]:
    return (
        ParamMapping("gate_proj.weight", "linear_fc1.weight", "gate_up_proj.weight", "gate", (size, "hidden"), feature),
        ParamMapping("up_proj.weight", "linear_fc1.weight", "gate_up_proj.weight", "up", (size, "hidden"), feature),
        ParamMapping("down_proj.weight", "linear_fc2.weight", "down_proj.weight", "columns", ("hidden", size), feature),
    )


_QKV, _QKV_VLLM = "self_attention.linear_qkv", "self_attn.qkv_proj"

# fmt: off
_LAYER = (
    ParamMapping("input_layernorm.weight", "input_layernorm.weight", "input_layernorm.weight", "replicated", ("hidden",)),
    ParamMapping("self_attn.q_proj.weight", f"{_QKV}.weight", f"{_QKV_VLLM}.weight", "query", ("heads", "hidden")),
    ParamMapping("self_attn.k_proj.weight", f"{_QKV}.weight", f"{_QKV_VLLM}.weight", "key", ("kv_heads", "hidden")),
    ParamMapping("self_attn.v_proj.weight", f"{_QKV}.weight", f"{_QKV_VLLM}.weight", "value", ("kv_heads", "hidden")),
    ParamMapping("self_attn.q_proj.bias", f"{_QKV}.bias", f"{_QKV_VLLM}.bias", "query", ("heads",), "qkv_bias"),
    ParamMapping("self_attn.k_proj.bias", f"{_QKV}.bias", f"{_QKV_VLLM}.bias", "key", ("kv_heads",), "qkv_bias"),
    ParamMapping("self_attn.v_proj.bias", f"{_QKV}.bias", f"{_QKV_VLLM}.bias", "value", ("kv_heads",), "qkv_bias"),
    ParamMapping("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "replicated",
                 ("head",), "qk_norm"),
    ParamMapping("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "replicated",
                 ("head",), "qk_norm"),
    ParamMapping("self_attn.o_proj.weight", "self_attention.linear_proj.weight", "self_attn.o_proj.weight", "columns",
                 ("hidden", "heads")),
    ParamMapping("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "replicated",
                 ("hidden",)),
    *(mapping.within("mlp", "mlp") for mapping in _mlp("dense_ffn", "dense_mlp")),
)
EMBEDDING = ParamMapping("model.embed_tokens.weight", "embedding.word_embeddings.weight", "model.embed_tokens.weight", "vocab",
                         ("vocab", "hidden"))
FINAL_NORM = ParamMapping("model.norm.weight", "decoder.final_layernorm.weight", "model.norm.weight", "replicated", ("hidden",))
HEAD = ParamMapping("lm_head.weight", "output_layer.weight", "lm_head.weight", "vocab", ("vocab", "hidden"), "untied_head")
# fmt: on


class _ExpertNames(NamedTuple):
    """``ends_everywhere``: vLLM makes embedding, norm and head on all pipeline stages."""

    block: str
    gate: str
    up: str
    down: str
    ends_everywhere: bool = True


EXPERT_NAMES = {
    "MixtralForCausalLM": _ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    "Qwen3MoeForCausalLM": _ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    "Glm4MoeForCausalLM": _ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", ends_everywhere=False),
}

_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Transformer Engine keeps a norm's weight in the next linear layer."""


def layer_mappings(
    spec: ModelSpec, layer: int, local: int, *, fused_norms: bool = False, experts: range | None = None
) -> Iterator[ParamMapping]:
    """``local`` is the layer's number in its Megatron chunk."""
    fused = dict(_FUSED_NORMS) if fused_norms else {}
    expert_mappings: tuple[ParamMapping, ...] = ()
    if spec.experts is not None and spec.has_experts(layer):
        fused.pop("pre_mlp_layernorm.weight", None)  # the router follows this norm, not a linear layer of Transformer Engine
        local_experts = experts or range(spec.experts.count)
        expert_mappings = _expert_mappings(spec.architecture, spec.experts, local_experts, grouped=fused_norms)
    for mapping in (*_LAYER, *expert_mappings):
        if mapping.applies(spec, layer):
            named = replace(mapping, megatron=fused[mapping.megatron]) if mapping.megatron in fused else mapping
            yield named.within(f"model.layers.{layer}", f"decoder.layers.{local}")


@lru_cache(maxsize=256)
def _expert_mappings(architecture: str, experts: Experts, local_experts: range, *, grouped: bool) -> tuple[ParamMapping, ...]:
    names = EXPERT_NAMES[architecture]
    router = f"{names.block}.gate.weight"
    mappings = [ParamMapping(router, "mlp.router.weight", router, "replicated", ("experts", "hidden"))]
    if experts.biased:
        bias = f"{names.block}.gate.{EXPERT_BIAS}"
        mappings.append(ParamMapping(bias, "mlp.router.expert_bias", bias, "replicated", ("experts",)))
    if experts.shared_ffn_size:
        mappings += [mapping.within(f"{names.block}.shared_experts", "mlp.shared_experts") for mapping in _mlp("shared_ffn")]
    for number, expert in enumerate(local_experts):
        ours = f"{names.block}.experts.{expert}"
        theirs = f"{names.block}.experts.routed_experts"
        fc1, fc2 = (
            f"mlp.experts.{linear}.weight{number}" if grouped else f"mlp.experts.local_experts.{number}.{linear}.weight"
            for linear in ("linear_fc1", "linear_fc2")
        )
        mappings += [
            ParamMapping(f"{ours}.{names.gate}.weight", fc1, f"{theirs}.w13_weight", "gate", ("ffn", "hidden"), expert=expert),
            ParamMapping(f"{ours}.{names.up}.weight", fc1, f"{theirs}.w13_weight", "up", ("ffn", "hidden"), expert=expert),
            ParamMapping(
                f"{ours}.{names.down}.weight", fc2, f"{theirs}.w2_weight", "columns", ("hidden", "ffn"), expert=expert
            ),
        ]
    return tuple(mappings)


@lru_cache(maxsize=64)
def tensor_shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Streaming order: embedding, layers, norm, head."""
    layers = [mapping for layer in range(spec.num_layers) for mapping in layer_mappings(spec, layer, layer)]
    model = [EMBEDDING, *layers, FINAL_NORM, HEAD]
    return {mapping.tensor: mapping.shape_in(spec) for mapping in model if mapping.applies(spec)}
