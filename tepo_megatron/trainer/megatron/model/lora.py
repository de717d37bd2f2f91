"""LoRA: W + scale · B · A, rounded once to the model's dtype, equals the rollout servers' bits."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tepo_megatron.config import LoraConfig
from tepo_megatron.trainer.megatron.model.fp8 import LazyWeights
from tepo_megatron.weights.adapters import AdapterBlock, adapted_tensors, adapter_layouts, adapter_names
from tepo_megatron.weights.geometry import ShardLayout
from tepo_megatron.weights.storage.hf_folder import AdapterSettings, load_adapters
from tepo_megatron.weights.transfer.full_tensors import GatherPlan


@dataclass
class Lora:
    config: LoraConfig
    tensors: Sequence[str]
    layout: ShardLayout
    sources: GatherPlan
    params: dict[str, torch.nn.Parameter] = field(repr=False)
    adapters: dict[str, _Adapter] = field(default_factory=dict, repr=False)  # by the parameters that they change
    on: bool = True

    @classmethod
    def build(
        cls,
        config: LoraConfig,
        chunks: Sequence[torch.nn.Module],
        params: Mapping[str, torch.nn.Parameter],
        layouts: Sequence[ShardLayout],
        *,
        rank: int,
        seed: int,
    ) -> Lora:
        """Raises ValueError for targets that match nothing. Every rank calls before Megatron's DDP exists."""
        layout_of_model = layouts[rank]
        tensors = adapted_tensors(layout_of_model.shapes, config.target_modules)
        adapted = adapter_layouts(layouts, tensors, config.rank)
        for chunk in chunks:
            chunk.requires_grad_(False)
        layout = adapted[rank]
        held = layout_of_model.by_tensor(frozenset(tensors))
        pairs = _new_parameters(layout, {shard.tensor: params[shard.param] for shards in held.values() for shard in shards})
        lora = cls(config, tensors, layout, GatherPlan(adapted), pairs)
        if config.path is None:
            _draw(layout, pairs, seed)
        else:
            load_adapters(config.path, layout, pairs)
        by_param: dict[str, list[str]] = {}
        for tensor, shards in held.items():
            by_param.setdefault(shards[0].param, []).append(tensor)
        for name, members in by_param.items():
            matrices = [pairs[part] for tensor in members for part in adapter_names(tensor)]
            lora.add(name, [AdapterBlock.of(held[tensor]) for tensor in members], matrices)
        lora.attach(chunks, params)
        return lora

    def add(self, name: str, blocks: Sequence[Sequence[AdapterBlock]], pairs: Sequence[torch.nn.Parameter]) -> None:
        """``pairs``: A [rank, columns], B [rows, rank] per matrix; ``blocks``: where rows of the parameter ``name`` belong."""
        self.adapters[name] = _Adapter(self.config.scale, blocks, pairs)

    def attach(self, chunks: Sequence[torch.nn.Module], params: Mapping[str, torch.nn.Parameter]) -> None:
        """Lets modules compute with merged weights, and makes adapters submodules of their chunk."""
        by_identity = {id(params[name]): adapter for name, adapter in self.adapters.items()}
        for chunk in chunks:
            modules = torch.nn.ModuleList()
            for module in list(chunk.modules()):
                here = {
                    attribute: by_identity[id(param)]
                    for attribute, param in module._parameters.items()
                    if param is not None and id(param) in by_identity
                }
                if here:
                    modules.extend(here.values())
                    module.forward = _with_merged_weights(module, here, lambda: self.on)
            chunk.lora = modules
            embedding = getattr(chunk, "embedding", None)
            if embedding is not None:
                embedding.register_forward_hook(_start_graph)

    def merged(self, params: Mapping[str, Tensor], *, remember: bool = True) -> Mapping[str, Tensor]:
        """Merges at each access. ``remember`` keeps the last one."""
        last: dict[str, Tensor] = {}

        def merge(name: str, param: Tensor) -> Tensor:
            if name not in self.adapters:
                return param
            if name not in last:
                last.clear()
                with torch.no_grad():
                    last[name] = self.adapters[name].forward(param)  # hooks would gather, and other ranks may not merge
            return last[name] if remember else last.pop(name)

        return LazyWeights(params, merge)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        self.on = False
        try:
            yield
        finally:
            self.on = True

    def settings(self) -> AdapterSettings:
        config, targets = self.config, dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in self.tensors)
        return AdapterSettings(config.rank, config.alpha, config.rslora, config.dropout, tuple(targets))

    def sum_gradients(self) -> None:
        """Sums over ranks with copies of A or B, after micro-batches and data-parallel ranks. Every rank calls."""
        for of_experts in (False, True):
            group = _tensor_group(of_experts)
            copies = [
                param
                for name, param in self.params.items()
                if _is_expert(name) == of_experts and tuple(param.shape) == self.layout.shapes[name]
            ]
            if copies and dist.get_world_size(group) > 1:
                grads = [param.main_grad for param in copies]  # type: ignore[attr-defined]
                flat = torch.cat([grad.reshape(-1) for grad in grads])
                dist.all_reduce(flat, group=group)
                for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                    grad.copy_(summed.view_as(grad))


def _new_parameters(layout: ShardLayout, bases: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    made: dict[str, torch.nn.Parameter] = {}
    for tensor, base in bases.items():
        for name in adapter_names(tensor):
            param = torch.nn.Parameter(torch.zeros(layout.params[name], dtype=base.dtype, device=base.device))
            # Megatron leaves copies out of the gradient norm, by these two marks; ``allreduce`` is its mark of experts.
            copied = layout.params[name] == layout.shapes[name]
            param.tensor_model_parallel = True  # type: ignore[attr-defined]
            param.shared = copied and dist.get_rank(_tensor_group(_is_expert(name))) > 0  # type: ignore[attr-defined]
            param.allreduce = getattr(base, "allreduce", True)  # type: ignore[attr-defined]
            made[name] = param
    return made


def _draw(layout: ShardLayout, params: Mapping[str, torch.nn.Parameter], seed: int) -> None:
    """A is uniform within ±1 / sqrt(in) as in PEFT, equal under every layout."""
    for shard in layout.shards:
        if shard.tensor.endswith(".lora_A.weight"):
            digest = hashlib.sha256(f"{seed} {shard.tensor}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
            shape = layout.shapes[shard.tensor]
            whole = (torch.rand(shape, generator=generator) * 2 - 1) / shape[1] ** 0.5
            with torch.no_grad():
                params[shard.param][shard.param_box.slices] = whole[shard.box.slices].to(params[shard.param])


def _is_expert(name: str) -> bool:
    return ".experts." in name


def _tensor_group(of_experts: bool) -> dist.ProcessGroup:
    if of_experts:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: float, blocks: Sequence[Sequence[AdapterBlock]], *pairs: Tensor) -> Tensor:
        ctx.scale, ctx.blocks = scale, blocks
        ctx.save_for_backward(*pairs)
        merged = weight.detach().clone()
        for (a, b), parts in zip(_pairs(pairs), blocks, strict=True):
            change = (b.float() * scale) @ a.float()
            for block in parts:
                merged[block.param_rows] += change[block.local_rows]  # added in fp32, rounded once
        return merged

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor] = []
        for (a, b), parts in zip(_pairs(ctx.saved_tensors), ctx.blocks, strict=True):
            part = torch.cat([grad[block.param_rows] for block in parts])
            gradients += [(b.t() @ part) * ctx.scale, (part @ a.t()) * ctx.scale]
        return None, None, None, *gradients


def _pairs(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(tensors[::2], tensors[1::2], strict=True)


class _Adapter(torch.nn.Module):
    def __init__(self, scale: float, blocks: Sequence[Sequence[AdapterBlock]], pairs: Sequence[torch.nn.Parameter]) -> None:
        super().__init__()
        self.scale, self.blocks = scale, blocks
        for number, param in enumerate(pairs):  # not in a list: Megatron gathers a module's own parameters before its forward
            self.register_parameter(f"matrix{number}", param)

    def forward(self, weight: Tensor) -> Tensor:
        return _Merge.apply(weight, self.scale, self.blocks, *self._parameters.values())


def _start_graph(module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
    # recomputed layers have gradients only if their input needs one; a frozen embedding's does not
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


def _with_merged_weights(
    module: torch.nn.Module, adapters: Mapping[str, _Adapter], is_on: Callable[[], bool]
) -> Callable[..., Any]:
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not is_on():
            return plain(*args, **kwargs)
        frozen = {attribute: module._parameters[attribute] for attribute in adapters}
        merged = {attribute: adapters[attribute](frozen[attribute]) for attribute in adapters}
        module._parameters.update(merged)
        try:
            with torch.autograd.graph.saved_tensors_hooks(_forgets(merged, frozen, adapters), _recall):
                result = plain(*args, **kwargs)
            _release(result, merged)
            return result
        finally:
            module._parameters.update(frozen)

    return forward


def _release(result: Any, merged: Mapping[str, Tensor]) -> None:
    # Transformer Engine's LayerNormLinear also has the weight as ``ctx.weight``; in 2.9 to 2.11 its backward never reads that.
    node: Any = getattr(result[0] if isinstance(result, tuple) else result, "grad_fn", None)
    weight = getattr(node, "weight", None)
    if any(weight is value for value in merged.values()):
        node.weight = None


def _forgets(
    merged: Mapping[str, Tensor], frozen: Mapping[str, Any], adapters: Mapping[str, _Adapter]
) -> Callable[[Tensor], Tensor | Callable[[], Tensor]]:
    saved, recalled = Counter[str](), Counter[str]()
    again: dict[str, Tensor] = {}
    attributes = {value.untyped_storage().data_ptr(): attribute for attribute, value in merged.items()}

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        attribute = attributes.get(tensor.untyped_storage().data_ptr())
        if attribute is None:
            return tensor
        saved[attribute] += 1
        view = (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return lambda: recall(attribute).as_strided(*view)

    def recall(attribute: str) -> Tensor:
        # Transformer Engine saves a weight twice and recalls both at once: merged once, and released with the second.
        if attribute not in again:
            again[attribute] = adapters[attribute](frozen[attribute])
        recalled[attribute] += 1
        return again[attribute] if recalled[attribute] % saved[attribute] else again.pop(attribute)

    return pack


@torch.no_grad()
def _recall(packed: Tensor | Callable[[], Tensor]) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()
