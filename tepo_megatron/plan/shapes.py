"""Shapes of known models, and numbers of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, NamedTuple

from tepo_megatron.config import LoraConfig, ParallelConfig
from tepo_megatron.weights.adapters import adapted_tensors, adapter_layout, adapter_shapes
from tepo_megatron.weights.architecture import ModelSpec, model_spec, read_model_spec
from tepo_megatron.weights.layouts import MegatronParallel, megatron_layout, pipeline_stages_of
from tepo_megatron.weights.table import tensor_shapes

_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
_MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
KNOWN_MODELS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "Llama-3.3-70B-Instruct": _LLAMA,
        "Qwen2.5-72B": _QWEN,
        "Qwen2.5-7B": {
            **_QWEN,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "rms_norm_eps": 1e-6,
        },
        "Mixtral-8x7B-v0.1": _MIXTRAL,
        "Qwen3-14B": _QWEN3,
        "Qwen3-30B-A3B": _QWEN3_MOE,
    }
)  # published ``config.json`` by folder name


def resolve_spec(source: str, field: str = "model.path") -> tuple[ModelSpec, str | None]:
    """Returns also the assumption made if the folder is missing. Raises ValueError for an unknown model."""
    if source.startswith("builtin:"):
        return read_model_spec(
            Path(str(files("tepo_megatron.tasks.data").joinpath("builtin", source.removeprefix("builtin:"))))
        ), None
    folder = Path(source).expanduser()
    if folder.is_dir():
        return read_model_spec(folder), None
    name = PurePath(source).name
    if name not in KNOWN_MODELS:
        raise ValueError(
            f"{field} = {source} is not on this machine, and the shape of {name!r} is not known here; give the folder "
            f"(its config.json is enough for a plan), or a path that ends in one of {', '.join(KNOWN_MODELS)}"
        )
    spec = model_spec(KNOWN_MODELS[name], f"known model {name}")
    return spec, f"{field} = {source} is not on this machine; shapes are those published for {name}"


def expert_tp(parallel: ParallelConfig) -> int:
    return parallel.tp if parallel.etp is None else parallel.etp


def expert_copies(parallel: ParallelConfig) -> int:
    """Counts ranks with the same part of the same experts."""
    return parallel.tp * parallel.cp * parallel.dp // (parallel.ep * expert_tp(parallel))


def expert_parameters(spec: ModelSpec, parallel: ParallelConfig) -> int:
    """Of a rank, in one layer, without router and shared experts."""
    if spec.experts is None:
        return 0
    return spec.experts.count // parallel.ep * 3 * spec.hidden_size * spec.ffn_size // expert_tp(parallel)


def _layer_parameters(spec: ModelSpec, parallel: ParallelConfig, layer: int) -> int:
    # norms and router are not split
    tp = parallel.tp
    qkv_rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim // tp
    attention = qkv_rows * (spec.hidden_size + spec.qkv_bias) + spec.hidden_size * spec.num_heads * spec.head_dim // tp
    if spec.experts is None or not spec.has_experts(layer):
        mlp = 3 * spec.hidden_size * (spec.dense_ffn_size or spec.ffn_size) // tp
    else:
        shared = 3 * spec.hidden_size * spec.experts.shared_ffn_size // tp
        mlp = spec.experts.count * spec.hidden_size + expert_parameters(spec, parallel) + shared
    norms = 2 * spec.hidden_size + (2 * spec.head_dim if spec.qk_norm else 0)
    return attention + mlp + norms


def linear_parameters(spec: ModelSpec) -> int:
    """Counts experts, but no router or head."""
    biases = spec.qkv_bias * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    routers = 0 if spec.experts is None else _expert_layers(spec) * spec.experts.count * spec.hidden_size
    norms = 2 * spec.hidden_size + (2 * spec.head_dim if spec.qk_norm else 0)
    return _all_layers(spec) - spec.num_layers * (norms + biases) - routers


def _expert_layers(spec: ModelSpec) -> int:
    return 0 if spec.experts is None else spec.num_layers - spec.dense_layers


def _all_layers(spec: ModelSpec) -> int:
    return sum(_layer_parameters(spec, ParallelConfig(), layer) for layer in range(spec.num_layers))


def vocabulary_parameters(spec: ModelSpec, tp: int) -> int:
    """A rank's part, with padding."""
    return spec.padded_vocab_size(tp) // tp * spec.hidden_size


def stage_layers(spec: ModelSpec, parallel: ParallelConfig) -> tuple[int, ...]:
    """Raises ValueError if the layers do not fit the stages."""
    return tuple(sum(map(len, chunks)) for chunks in pipeline_stages_of(spec, parallel))


def stage_expert_layers(spec: ModelSpec, parallel: ParallelConfig) -> tuple[int, ...]:
    return tuple(sum(map(spec.has_experts, stage)) for stage in _layers_of_stages(spec, parallel))


def stage_layer_parameters(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> int:
    return sum(_layer_parameters(spec, parallel, layer) for layer in _layers_of_stages(spec, parallel)[stage])


def _layers_of_stages(spec: ModelSpec, parallel: ParallelConfig) -> list[list[int]]:
    return [[layer for chunk in chunks for layer in chunk] for chunks in pipeline_stages_of(spec, parallel)]


def stage_parameters(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> int:
    count = stage_layer_parameters(spec, parallel, stage)
    first, last = stage == 0, stage == parallel.pp - 1
    if first:
        count += vocabulary_parameters(spec, parallel.tp)
    if last:
        count += spec.hidden_size
        if not (first and spec.tied_embeddings):  # tied: the last of several stages has a copy of the embedding
            count += vocabulary_parameters(spec, parallel.tp)
    return count


def model_parameters(spec: ModelSpec) -> int:
    """Without padding."""
    vocabulary = spec.vocab_size * spec.hidden_size
    return _all_layers(spec) + spec.hidden_size + vocabulary * (1 if spec.tied_embeddings else 2)


def active_parameters(spec: ModelSpec) -> int:
    """Without experts that are not chosen."""
    if spec.experts is None:
        return model_parameters(spec)
    idle = spec.experts.count - spec.experts.per_token
    return model_parameters(spec) - _expert_layers(spec) * idle * 3 * spec.hidden_size * spec.ffn_size


class AdapterCount(NamedTuple):
    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


@lru_cache(maxsize=64)
def layer_adapters(
    spec: ModelSpec, lora: LoraConfig, tp: int, ep: int, etp: int | None, *, sparse: bool = False
) -> AdapterCount:
    """A rank's adapter parameters. Raises ValueError for targets that match nothing."""
    one = replace(spec, num_layers=1, dense_layers=0 if sparse or spec.experts is None else 1)
    tensors = adapted_tensors(tensor_shapes(one), lora.target_modules)
    layout = adapter_layout(megatron_layout(one, MegatronParallel(tp=tp, ep=ep, etp=etp), 0), tensors, lora.rank)
    experts = sum(math.prod(shape) for name, shape in layout.params.items() if ".experts." in name)
    return AdapterCount(sum(map(math.prod, layout.params.values())) - experts, experts)


def stage_adapters(spec: ModelSpec, lora: LoraConfig, parallel: ParallelConfig, *, dense: int, sparse: int) -> AdapterCount:
    """``dense``, ``sparse``: layers without and with experts."""
    counts = [
        (layers, layer_adapters(spec, lora, parallel.tp, parallel.ep, parallel.etp, sparse=with_experts))
        for layers, with_experts in ((dense, False), (sparse, True))
        if layers
    ]
    return AdapterCount(sum(layers * one.dense for layers, one in counts), sum(layers * one.experts for layers, one in counts))


def model_adapters(spec: ModelSpec, lora: LoraConfig) -> int:
    shapes = tensor_shapes(spec)
    adapters = adapter_shapes(shapes, adapted_tensors(shapes, lora.target_modules), lora.rank)
    return sum(map(math.prod, adapters.values()))
