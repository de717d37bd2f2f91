"""Shapes of known models, and parameter counts of a model and of a training rank."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, NamedTuple

from tepo_megatron.config import LoraConfig, ParallelConfig
from tepo_megatron.runtime.hub import HUB, hub_folder
from tepo_megatron.weights.adapters import adapted_tensors, adapter_layouts, adapter_shapes
from tepo_megatron.weights.architecture import LLAMA3_ROPE, ModelSpec, is_always_fp32, read_model_spec
from tepo_megatron.weights.layouts import MegatronParallel, pipeline_stages_of
from tepo_megatron.weights.table import tensor_shapes


def _known(
    family: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, positions: int, **others: Any
) -> dict[str, Any]:
    return {
        "architectures": [f"{family}ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        **others,
    }


_LLAMA_ROPE = {"rope_type": "llama3", "factor": 8.0, **LLAMA3_ROPE}
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN3 = {"head_dim": 128, "rms_norm_eps": 1e-6}
_QWEN3_MOE = {**_QWEN3, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
KNOWN_MODELS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "Llama-3.3-70B-Instruct": _known(
            "Llama", 80, 8192, 28672, 64, 8, 128256, 131072, rope_theta=5e5, rope_scaling=_LLAMA_ROPE
        ),
        "Llama-3.1-8B": _known("Llama", 32, 4096, 14336, 32, 8, 128256, 131072, rope_theta=5e5, rope_scaling=_LLAMA_ROPE),
        "Qwen2-7B": _known("Qwen2", 28, 3584, 18944, 28, 4, 152064, 131072, rms_norm_eps=1e-6),
        "Qwen2.5-1.5B": _known("Qwen2", 28, 1536, 8960, 12, 2, 151936, 131072, rms_norm_eps=1e-6, tie_word_embeddings=True),
        "Qwen2.5-32B": _known("Qwen2", 64, 5120, 27648, 40, 8, 152064, 131072),
        "Qwen2.5-72B": _known("Qwen2", 80, 8192, 29568, 64, 8, 152064, 131072),
        "Qwen2.5-7B": _known("Qwen2", 28, 3584, 18944, 28, 4, 152064, 131072, rms_norm_eps=1e-6),
        "Mixtral-8x7B-v0.1": _known("Mixtral", 32, 4096, 14336, 32, 8, 32000, 32768, **_MIXTRAL),
        "Qwen3-8B": _known("Qwen3", 36, 4096, 12288, 32, 8, 151936, 40960, **_QWEN3),
        "Qwen3-14B": _known("Qwen3", 40, 5120, 17408, 40, 8, 151936, 40960, **_QWEN3),
        "Qwen3-30B-A3B": _known("Qwen3Moe", 48, 2048, 6144, 32, 4, 151936, 40960, **_QWEN3_MOE),
    }
)  # published ``config.json`` by folder name


def resolve_spec(source: str, field: str = "model.path") -> tuple[ModelSpec, str | None]:
    """Also returns the assumption about a missing folder. Raises ValueError for an unknown model."""
    folder = Path(source).expanduser()
    if source.startswith("builtin:"):
        folder = Path(str(files("tepo_megatron.tasks.data").joinpath("builtin", source.removeprefix("builtin:"))))
    elif not folder.is_dir():
        name = PurePath(source.partition("@")[0]).name
        base = name.removesuffix("-Instruct")
        if name not in KNOWN_MODELS and source.startswith(HUB):
            try:
                return read_model_spec(hub_folder(source, "model", files=("config.json",))), None
            except ValueError:
                if base not in KNOWN_MODELS:
                    raise
        known = name if name in KNOWN_MODELS else base
        if known not in KNOWN_MODELS:
            raise ValueError(
                f"{field} = {source} is not on this machine, and the shape of {known!r} is not known here; give the folder "
                f"(its config.json is enough for a plan), or a path that ends in one of {', '.join(KNOWN_MODELS)}"
            )
        fewer = {"max_position_embeddings": 32768} if known != name and known.startswith("Qwen2") else {}
        spec = ModelSpec.of({**KNOWN_MODELS[known], **fewer}, f"known model {name}")
        return spec, f"{field} = {source} is not on this machine; shapes are those published for {name}"
    return read_model_spec(folder), None


def _trained_tensors(spec: ModelSpec, lora: LoraConfig | None = None) -> Mapping[str, tuple[int, ...]]:
    shapes = {name: shape for name, shape in tensor_shapes(spec).items() if not is_always_fp32(name)}
    return shapes if lora is None else adapter_shapes(shapes, adapted_tensors(shapes, lora.target_modules), lora.rank)


CHECKPOINT_BYTES = 12
"""Of a trained parameter: the fp32 master and Adam's means."""


@lru_cache(maxsize=64)
def model_parameters(spec: ModelSpec, lora: LoraConfig | None = None) -> int:
    """Excludes padding; counts adapters alone with ``lora``."""
    return sum(map(math.prod, _trained_tensors(spec, lora).values()))


@lru_cache(maxsize=64)
def active_parameters(spec: ModelSpec) -> int:
    """Excludes experts that are not chosen."""
    if spec.experts is None:
        return model_parameters(spec)
    experts = sum(math.prod(shape) for name, shape in _trained_tensors(spec).items() if ".experts." in name)
    return model_parameters(spec) - experts * (spec.experts.count - spec.experts.per_token) // spec.experts.count


class _ParameterCount(NamedTuple):
    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


@lru_cache(maxsize=256)
def _layer_parameters(
    spec: ModelSpec, tp: int, ep: int, etp: int | None, *, has_experts: bool, lora: LoraConfig | None
) -> _ParameterCount:
    one = replace(spec, num_layers=1, dense_layers=0 if has_experts or spec.experts is None else 1)
    layout = MegatronParallel(tp=tp, ep=ep, etp=etp).layout(one, 0)
    if lora is not None:
        (layout,) = adapter_layouts([layout], adapted_tensors(layout.shapes, lora.target_modules), lora.rank)
    untrained = {shard.param for shard in layout.shards if is_always_fp32(shard.tensor)}
    sizes = {name: math.prod(shape) for name, shape in layout.params.items() if ".layers." in name and name not in untrained}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return _ParameterCount(sum(sizes.values()) - experts, experts)


@dataclass(frozen=True)
class ModelSplit:
    """A rank's parameters, by pipeline stage; with ``lora`` its adapters'.

    Raises ValueError if the layers do not fit the stages, or LoRA targets match nothing.
    """

    spec: ModelSpec
    parallel: ParallelConfig

    @property
    def expert_tp(self) -> int:
        return self.parallel.etp or self.parallel.tp

    @property
    def expert_copies(self) -> int:
        """Counts ranks with the same part of the same experts."""
        return self.parallel.tp * self.parallel.cp * self.parallel.dp // (self.parallel.ep * self.expert_tp)

    @property
    def stage_layers(self) -> list[list[int]]:
        return [[layer for chunk in stage for layer in chunk] for stage in pipeline_stages_of(self.spec, self.parallel)]

    @property
    def vocabulary(self) -> int:
        """Counts a rank's embedding weights, with padding."""
        return self.spec.padded_vocab_size(self.parallel.tp) // self.parallel.tp * self.spec.hidden_size

    def in_layers(self, stage: int, lora: LoraConfig | None = None) -> _ParameterCount:
        layers = self.stage_layers[stage]
        sparse = sum(map(self.spec.has_experts, layers))
        dense = experts = 0
        for count, has_experts in ((len(layers) - sparse, False), (sparse, True)):
            if count:
                split = self.parallel.tp, self.parallel.ep, self.parallel.etp
                layer = _layer_parameters(self.spec, *split, has_experts=has_experts, lora=lora)
                dense, experts = dense + count * layer.dense, experts + count * layer.experts
        return _ParameterCount(dense, experts)

    def in_stage(self, stage: int, lora: LoraConfig | None = None) -> _ParameterCount:
        """Also counts embedding, norm and head."""
        dense, experts = self.in_layers(stage, lora)
        if lora is not None:
            return _ParameterCount(dense, experts)
        first, last = stage == 0, stage == self.parallel.pp - 1
        if first:
            dense += self.vocabulary
        if last:
            dense += self.spec.hidden_size
            if not (first and self.spec.tied_embeddings):  # tied: the last of several stages has a copy of the embedding
                dense += self.vocabulary
        return _ParameterCount(dense, experts)

    def stages(self, lora: LoraConfig | None = None) -> list[_ParameterCount]:
        return [self.in_stage(stage, lora) for stage in range(self.parallel.pp)]
