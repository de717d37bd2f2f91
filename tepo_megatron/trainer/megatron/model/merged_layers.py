"""Layers that compute with merged weights: the parameter of a layer is exchanged while the layer runs.

A merged weight lives as long as its layer's forward or backward pass; no copy waits for the backward pass, which makes it again
(docs/decisions/021-lora.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.weights.layouts.adapters import AdapterBlock


class _Merge(torch.autograd.Function):
    """weight, (A, B) of each part → merged weight. Gradients go to A and B; the weight has none."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: float, blocks: Sequence[Sequence[AdapterBlock]], *pairs: Tensor) -> Tensor:
        ctx.scale, ctx.blocks = scale, blocks
        ctx.save_for_backward(*pairs)
        merged = weight.detach().clone()
        for (a, b), own in zip(_pairs(pairs), blocks, strict=True):
            change = (b.float() * scale) @ a.float()
            for block in own:
                merged[block.param_rows] += change[block.local_rows]  # added in fp32, rounded once
        return merged

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor] = []
        for (a, b), own in zip(_pairs(ctx.saved_tensors), ctx.blocks, strict=True):
            part = torch.cat([grad[block.param_rows] for block in own])
            found += [(b.t() @ part) * ctx.scale, (part @ a.t()) * ctx.scale]
        return None, None, None, *found


def _pairs(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(tensors[::2], tensors[1::2], strict=True)


class Adapter(torch.nn.Module):
    """The adapters of one parameter of the model: of each of the matrices that are fused in it and have one."""

    def __init__(self, scale: float, blocks: Sequence[Sequence[AdapterBlock]], pairs: Sequence[torch.nn.Parameter]) -> None:
        """``pairs``: A [rank, columns] and B [rows, rank] of each matrix in turn; ``blocks``: where its rows belong."""
        super().__init__()
        self.scale, self.blocks = scale, blocks
        for number, param in enumerate(pairs):  # its own, not a list's: Megatron gathers what a module has before its forward
            self.register_parameter(f"matrix{number}", param)

    def forward(self, weight: Tensor) -> Tensor:
        """Returns the merged weight, in the weight's shape and dtype."""
        merged: Tensor = _Merge.apply(weight, self.scale, self.blocks, *self._parameters.values())
        return merged


def hang_adapters(
    adapters: Mapping[str, Adapter],
    chunks: Sequence[torch.nn.Module],
    params: Mapping[str, torch.nn.Parameter],
    is_on: Callable[[], bool],
) -> None:
    """Makes the adapters modules of their chunks, and the adapted layers compute with merged weights while ``is_on()``.

    ``adapters`` are by the names of the parameters, in ``params``, that they change.
    """
    by_identity = {id(params[name]): adapter for name, adapter in adapters.items()}
    for chunk in chunks:
        own = torch.nn.ModuleList()
        for module in list(chunk.modules()):
            here = {
                attribute: by_identity[id(param)]
                for attribute, param in module._parameters.items()
                if param is not None and id(param) in by_identity
            }
            if here:
                own.extend(here.values())
                module.forward = with_merged_weights(module, here, is_on)
        chunk.lora = own
        embedding = getattr(chunk, "embedding", None)
        if embedding is not None:
            embedding.register_forward_hook(_start_graph)


def _start_graph(module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Recomputed layers have gradients only if their input asks for one, which that of a frozen embedding does not."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


def with_merged_weights(
    module: torch.nn.Module, adapters: Mapping[str, Adapter], is_on: Callable[[], bool]
) -> Callable[..., Any]:
    """Returns a forward for ``module`` in which ``adapters``, by the names of its parameters, are merged into these."""
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not is_on():
            return plain(*args, **kwargs)
        frozen = {attribute: module._parameters[attribute] for attribute in adapters}
        merged = {attribute: adapters[attribute](frozen[attribute]) for attribute in adapters}
        module._parameters.update(merged)
        try:
            with torch.autograd.graph.saved_tensors_hooks(_forgets(merged, frozen, adapters), _recall):
                return plain(*args, **kwargs)
        finally:
            module._parameters.update(frozen)
            merged.clear()  # the hook would keep it

    return forward


@dataclass(frozen=True)
class _Forgotten:
    """A merged weight, or a view of it, that the backward pass needs: what to make it again from."""

    adapter: Adapter
    weight: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _forgets(
    merged: Mapping[str, Tensor], frozen: Mapping[str, Any], adapters: Mapping[str, Adapter]
) -> Callable[[Tensor], Tensor | _Forgotten]:
    def pack(tensor: Tensor) -> Tensor | _Forgotten:
        for attribute, value in merged.items():
            if tensor.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
                offset = int(tensor.storage_offset())
                return _Forgotten(adapters[attribute], frozen[attribute], tensor.size(), tensor.stride(), offset)
        return tensor

    return pack


def _recall(packed: Tensor | _Forgotten) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    with torch.no_grad():
        merged: Tensor = packed.adapter(packed.weight)
    return merged.as_strided(packed.size, packed.stride, packed.offset)


class MergedWeights(Mapping[str, Tensor]):
    """A read-only view of parameters in which adapted ones are merged at each access; ``remember``: the last one is kept."""

    def __init__(self, params: Mapping[str, Tensor], adapters: Mapping[str, Adapter], *, remember: bool) -> None:
        self._params, self._adapters, self._remember = params, adapters, remember
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._adapters:
            return self._params[name]
        if self._last is not None and self._last[0] == name:
            return self._last[1]
        with torch.no_grad():
            merged: Tensor = self._adapters[name](self._params[name])
        if self._remember:
            self._last = (name, merged)
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)
