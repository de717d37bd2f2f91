"""Counts LoRA's parameters, by the layouts that the engine makes them from."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from tepo_megatron.config import LoraConfig, ParallelConfig
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts import MegatronParallel, megatron_layout, tensor_shapes
from tepo_megatron.weights.layouts.adapters import adapted_tensors, adapter_layout, adapter_shapes


class AdapterCount(NamedTuple):
    """Parameters of adapters: those of dense weights, and those of experts."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


@lru_cache(maxsize=64)
def layer_adapters(
    spec: ModelSpec, lora: LoraConfig, tp: int, ep: int, etp: int | None, *, sparse: bool = False
) -> AdapterCount:
    """Counts a rank's parameters of the adapters of one layer, with experts or without. Raises ValueError for targets that
    match nothing."""
    one = replace(spec, num_layers=1, dense_layers=0 if sparse or spec.experts is None else 1)
    tensors = adapted_tensors(tensor_shapes(one), lora.target_modules)
    layout = adapter_layout(megatron_layout(one, MegatronParallel(tp=tp, ep=ep, etp=etp), 0), tensors, lora.rank)
    experts = sum(math.prod(shape) for name, shape in layout.params.items() if ".experts." in name)
    return AdapterCount(sum(map(math.prod, layout.params.values())) - experts, experts)


def stage_adapters(spec: ModelSpec, lora: LoraConfig, parallel: ParallelConfig, *, dense: int, sparse: int) -> AdapterCount:
    """Counts a rank's parameters of the adapters of ``dense`` layers without experts and ``sparse`` layers with some."""
    counts = [
        (layers, layer_adapters(spec, lora, parallel.tp, parallel.ep, parallel.etp, sparse=with_experts))
        for layers, with_experts in ((dense, False), (sparse, True))
        if layers
    ]
    return AdapterCount(sum(layers * one.dense for layers, one in counts), sum(layers * one.experts for layers, one in counts))


def model_adapters(spec: ModelSpec, lora: LoraConfig) -> int:
    """Counts the parameters of all adapters of the model."""
    shapes = tensor_shapes(spec)
    found = adapter_shapes(shapes, adapted_tensors(shapes, lora.target_modules), lora.rank)
    return sum(map(math.prod, found.values()))
