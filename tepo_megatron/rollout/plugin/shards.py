"""Puts shards that already lie as vLLM's parameters do into a model, whatever its layers make of their weights afterwards.

vLLM's layerwise reload gives every layer its unprocessed parameters back, has each parameter's ``weight_loader`` fill them from
full tensors, and lets the layer process them (repack, quantise) when all its elements are loaded. Here the loaders are
exchanged for vLLM's default one, which takes a tensor of the parameter's own shape: docs/decisions/007-shards-into-vllm.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    initialize_layerwise_reload,
    initialize_online_processing,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from tepo_megatron.bridge.messages import Queues

Place = tuple[torch.nn.Module, str]


class ShardLoader(Mapping[str, Tensor]):
    """The model's unprocessed parameters by name, to be written during an update, between ``start`` and ``complete`` of each.

    Making it checks that ``incoming`` fills the model. Raises RuntimeError that names every parameter which it would miss, that
    the model has not, or that would be filled in part; and for a quantised model.
    """

    def __init__(self, model: torch.nn.Module, incoming: Queues, *, quantization: str | None) -> None:
        if quantization is not None:
            raise RuntimeError(
                f"shards cannot be put into a model quantised by vLLM ({quantization}); set rollout.server.transfer = gather"
            )
        self._model = model
        self._places = _places(model)
        self._given = _elements(incoming)
        self._materialized: set[str] = set()
        self._check()

    def start(self) -> None:
        """Give every layer its unprocessed parameters back, without memory as yet."""
        self._materialized.clear()
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
        return getattr(module, attribute)

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def complete(self, name: str) -> None:
        """All elements of a parameter have been written: its layer may process it, and gets its live tensors back."""
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


def _places(model: torch.nn.Module) -> dict[str, list[Place]]:
    """Parameter → every module that holds it. A tied head shares its parameter with the embedding, but may process it apart."""
    names: dict[int, str] = {}
    places: dict[str, list[Place]] = {}
    for prefix, module in model.named_modules():
        for attribute, param in module.named_parameters(recurse=False):
            name = names.setdefault(id(param), f"{prefix}.{attribute}" if prefix else attribute)
            places.setdefault(name, []).append((module, attribute))
    return places


def _elements(incoming: Queues) -> dict[str, int]:
    total: dict[str, int] = {}
    for piece in (piece for queue in incoming.values() for message in queue for piece in message):
        total[piece.end.param] = total.get(piece.end.param, 0) + piece.numel
    return total


def _wanted(place: Place) -> int:
    """Elements of the unprocessed parameter that come from a checkpoint."""
    module, attribute = place
    original = get_layerwise_info(module).restore_metadata[0].get(attribute)
    shape = (original if original is not None else getattr(module, attribute)).shape  # a bias is never taken away
    rows = module.shard_indices.num_org_elements if isinstance(module, VocabParallelEmbedding) else shape[0]
    return rows * shape[1:].numel()
