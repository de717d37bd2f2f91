"""Where each Hugging Face tensor lies in Megatron-Core and in vLLM: the declarative table, and the shapes in its terms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tepo_megatron.bridge.architecture import ModelSpec

Placement = Literal["replicated", "columns", "vocab", "gate", "up", "query", "key", "value"]
"""How a tensor is split over tensor-parallel ranks, and which part of a fused parameter it is."""

Dimension = Literal["hidden", "heads", "kv_heads", "head", "ffn", "vocab"]
"""``heads`` and ``kv_heads`` count rows of all (key/value) heads together, ``head`` those of one."""

Feature = Literal["qkv_bias", "qk_norm", "untied_head"]


@dataclass(frozen=True)
class Entry:
    """A tensor, the parameter of either side that holds it, and how. ``feature``: only models with it have the tensor."""

    tensor: str
    megatron: str
    vllm: str
    placement: Placement
    shape: tuple[Dimension, ...]
    feature: Feature | None = None

    def of_layer(self, layer: int, local: int) -> Entry:
        """This entry of layer ``layer``, which is the ``local``-th of its Megatron chunk."""
        return replace(
            self,
            tensor=f"model.layers.{layer}.{self.tensor}",
            megatron=f"decoder.layers.{local}.{self.megatron}",
            vllm=f"model.layers.{layer}.{self.vllm}",
        )


QKV, QKV_VLLM = "self_attention.linear_qkv", "self_attn.qkv_proj"

# fmt: off
LAYER = (
    Entry("input_layernorm.weight", "input_layernorm.weight", "input_layernorm.weight", "replicated", ("hidden",)),
    Entry("self_attn.q_proj.weight", f"{QKV}.weight", f"{QKV_VLLM}.weight", "query", ("heads", "hidden")),
    Entry("self_attn.k_proj.weight", f"{QKV}.weight", f"{QKV_VLLM}.weight", "key", ("kv_heads", "hidden")),
    Entry("self_attn.v_proj.weight", f"{QKV}.weight", f"{QKV_VLLM}.weight", "value", ("kv_heads", "hidden")),
    Entry("self_attn.q_proj.bias", f"{QKV}.bias", f"{QKV_VLLM}.bias", "query", ("heads",), "qkv_bias"),
    Entry("self_attn.k_proj.bias", f"{QKV}.bias", f"{QKV_VLLM}.bias", "key", ("kv_heads",), "qkv_bias"),
    Entry("self_attn.v_proj.bias", f"{QKV}.bias", f"{QKV_VLLM}.bias", "value", ("kv_heads",), "qkv_bias"),
    Entry("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "replicated",
          ("head",), "qk_norm"),
    Entry("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "replicated",
          ("head",), "qk_norm"),
    Entry("self_attn.o_proj.weight", "self_attention.linear_proj.weight", "self_attn.o_proj.weight", "columns",
          ("hidden", "heads")),
    Entry("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "replicated",
          ("hidden",)),
    Entry("mlp.gate_proj.weight", "mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", "gate", ("ffn", "hidden")),
    Entry("mlp.up_proj.weight", "mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", "up", ("ffn", "hidden")),
    Entry("mlp.down_proj.weight", "mlp.linear_fc2.weight", "mlp.down_proj.weight", "columns", ("hidden", "ffn")),
)
EMBEDDING = Entry("model.embed_tokens.weight", "embedding.word_embeddings.weight", "model.embed_tokens.weight", "vocab",
                  ("vocab", "hidden"))
FINAL_NORM = Entry("model.norm.weight", "decoder.final_layernorm.weight", "model.norm.weight", "replicated", ("hidden",))
HEAD = Entry("lm_head.weight", "output_layer.weight", "lm_head.weight", "vocab", ("vocab", "hidden"), "untied_head")
# fmt: on

FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Transformer Engine's layers keep a norm's weight inside the linear that follows it."""


def applies(entry: Entry, spec: ModelSpec) -> bool:
    """Whether the model has this tensor."""
    has = {"qkv_bias": spec.qkv_bias, "qk_norm": spec.qk_norm, "untied_head": not spec.tied_embeddings}
    return entry.feature is None or has[entry.feature]


def layer_entries(spec: ModelSpec, layer: int, local: int, *, fused_norms: bool = False) -> Iterator[Entry]:
    """The tensors of one layer, which is the ``local``-th of its Megatron chunk."""
    for entry in LAYER:
        if applies(entry, spec):
            fused = FUSED_NORMS.get(entry.megatron) if fused_norms else None
            yield (replace(entry, megatron=fused) if fused else entry).of_layer(layer, local)


def shape_of(entry: Entry, spec: ModelSpec) -> tuple[int, ...]:
    """The full shape of the Hugging Face tensor."""
    sizes: dict[Dimension, int] = {
        "hidden": spec.hidden_size,
        "heads": spec.num_heads * spec.head_dim,
        "kv_heads": spec.num_kv_heads * spec.head_dim,
        "head": spec.head_dim,
        "ffn": spec.ffn_size,
        "vocab": spec.vocab_size,
    }
    return tuple(sizes[dimension] for dimension in entry.shape)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor of the model with its shape, in streaming order: embedding, layers, norm, head."""
    layers = [entry for layer in range(spec.num_layers) for entry in layer_entries(spec, layer, layer)]
    return {entry.tensor: shape_of(entry, spec) for entry in [EMBEDDING, *layers, FINAL_NORM, HEAD] if applies(entry, spec)}
