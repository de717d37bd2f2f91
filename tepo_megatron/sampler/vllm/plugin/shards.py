"""Loads shards of vLLM's own layout into a model: docs/decisions/007-shards-into-vllm.md, 010-fp8-rollouts.md.

vLLM's layerwise reload restores every layer's unprocessed parameters, and the layer processes them when all are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PerBlockOnlineLinearMethod,
    Fp8PerBlockOnlineMoEMethod,
    OnlineLinearBase,
)
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    initialize_layerwise_reload,
    initialize_online_processing,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_layer
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from tepo_megatron.weights.transfer.messages import Queues

Place = tuple[torch.nn.Module, str]

_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
_ONLINE = (OnlineLinearBase, OnlineMoEMethodBase)
_ONLINE_WITHIN_A_SHARD = (Fp8PerBlockOnlineLinearMethod, Fp8PerBlockOnlineMoEMethod)


class ShardLoader(Mapping[str, Tensor]):
    """The model's unprocessed parameters by name. Write each between ``start`` and ``complete``. All workers of a server must
    take part.

    The constructor raises RuntimeError if ``incoming`` lacks or adds parameters, or the checkpoint is quantised.
    """

    def __init__(self, model: torch.nn.Module, incoming: Queues) -> None:
        _refuse_quantised_checkpoints(model)
        self._model = model
        self._places = _places(model)
        self._given = _elements(incoming)
        self._materialized: set[str] = set()
        self._waiting: set[str] = set()
        self._check()

    def start(self) -> None:
        """The parameters have no memory yet."""
        self._materialized.clear()
        self._waiting.clear()
        initialize_layerwise_reload(self._model)
        for layer in self._model.modules():
            for _, param in layer.named_parameters(recurse=False):
                param.weight_loader = default_weight_loader  # type: ignore[attr-defined]
            initialize_online_processing(layer)

    def __getitem__(self, name: str) -> Tensor:
        module, attribute = self._places[name][0]
        if name not in self._materialized:
            self._materialized.add(name)
            materialize_layer(module, get_layerwise_info(module))
            if self._given[name] < getattr(module, attribute).numel():
                getattr(module, attribute).data.zero_()  # rows that pad the vocabulary
        param = getattr(module, attribute)
        return param.data.flatten(0, 1) if param.dim() == 3 else param  # experts: one below the other, as the layouts have them

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def complete(self, name: str) -> None:
        """The parameter is written: its layer may process it. A layer with scales over all workers waits for ``finish``, since
        workers get shards in different orders.
        """
        if any(_agrees_with_other_workers(module) for module, _ in self._places[name]):
            self._waiting.add(name)
        else:
            self._load(name)

    def finish(self) -> None:
        """All workers have all parameters: processes the layers that waited, in the model's order."""
        for name in self._places:
            if name in self._waiting:
                self._load(name)
        self._waiting.clear()

    def _load(self, name: str) -> None:
        first, *others = self._places[name]
        data = getattr(*first).data
        for module, attribute in others:
            materialize_layer(module, get_layerwise_info(module))
            getattr(module, attribute).data.copy_(data)
        for module, attribute in (first, *others):
            param = getattr(module, attribute)
            param.weight_loader(param, param.data)  # a copy onto itself: what counts is that vLLM counts it

    def _check(self) -> None:
        wanted = {name: _wanted(places[0]) for name, places in self._places.items()}
        problems = [f"the model has no {name}" for name in self._given if name not in wanted]
        for name, elements in wanted.items():
            if self._given.get(name, 0) != elements:
                problems.append(f"{name} would get {self._given.get(name, 0)} of {elements} elements")
        if problems:
            raise RuntimeError(f"the trainer's plan does not fit this worker's model: {'; '.join(problems)}")


def _refuse_quantised_checkpoints(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        online = isinstance(method, _ONLINE) and getattr(method, "requantization_source", None) is None
        if method is not None and not online and not isinstance(method, _PLAIN):
            raise RuntimeError(
                f"{name} holds weights that were quantised before they were loaded ({type(method).__name__}), which shards in "
                "full precision cannot replace; serve the model's full-precision folder, and set rollout.server.quantization"
            )


def _agrees_with_other_workers(module: torch.nn.Module) -> bool:
    """If quantising takes the largest weight over all workers, all must do it at the same point."""
    method = getattr(module, "quant_method", None)
    split = isinstance(method, _ONLINE) and not isinstance(method, _ONLINE_WITHIN_A_SHARD)
    return split and get_tensor_model_parallel_world_size() > 1


def _places(model: torch.nn.Module) -> dict[str, list[Place]]:
    """A parameter has several modules if a tied head shares it with the embedding. Computed scales are not included."""
    names: dict[int, str] = {}
    places: dict[str, list[Place]] = {}
    for prefix, module in model.named_modules():
        unprocessed = get_layerwise_info(module).restore_metadata[0].keys() | SKIP_TENSORS
        for attribute, param in module.named_parameters(recurse=False):
            if attribute not in unprocessed:
                continue
            name = names.setdefault(id(param), f"{prefix}.{attribute}" if prefix else attribute)
            places.setdefault(name, []).append((module, attribute))
    return places


def _elements(incoming: Queues) -> dict[str, int]:
    total: dict[str, int] = {}
    for segment in (segment for queue in incoming.values() for message in queue for segment in message):
        total[segment.end.param] = total.get(segment.end.param, 0) + segment.numel
    units = {segment.end.param: segment.end.units for queue in incoming.values() for message in queue for segment in message}
    return {name: elements // units[name] for name, elements in total.items()}


def _wanted(place: Place) -> int:
    module, attribute = place
    original = get_layerwise_info(module).restore_metadata[0].get(attribute)
    shape = (original if original is not None else getattr(module, attribute)).shape  # a bias is never taken away
    rows = module.shard_indices.num_org_elements if isinstance(module, VocabParallelEmbedding) else shape[0]
    return rows * shape[1:].numel()
