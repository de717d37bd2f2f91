"""LoRA: low-rank adapters that are trained while the weights stay as they are.

A layer computes with its merged weight, W + scale · B · A, rounded once to the model's dtype: with the very bits that the
rollout servers get. So tensor, sequence, expert and context parallelism are the layer's own business, whichever layer it is,
and only the gradients of what several ranks hold a copy of are summed here (docs/decisions/021-lora.md). How a layer runs
with them: ``model/merged_layers.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tepo_megatron.config import LoraConfig
from tepo_megatron.trainer.megatron.model.merged_layers import Adapter, MergedWeights, hang_adapters
from tepo_megatron.weights.geometry import Shard, ShardLayout
from tepo_megatron.weights.layouts.adapters import (
    adapted_tensors,
    adapter_blocks,
    adapter_layout,
    adapter_names,
    shards_by_tensor,
)
from tepo_megatron.weights.storage.hf_folder import AdapterSettings, load_adapters
from tepo_megatron.weights.transfer.full_tensors import gather_sources, gather_to_root


@dataclass
class Lora:
    """A rank's adapters. ``params`` are what is trained, by the names of ``layout``; ``layouts`` are those of all ranks."""

    config: LoraConfig
    tensors: Sequence[str]
    """The weights that have adapters, of the whole model."""
    layouts: Sequence[ShardLayout]
    layout: ShardLayout
    sources: Mapping[str, list[tuple[int, Shard]]]
    params: dict[str, torch.nn.Parameter] = field(repr=False)
    adapters: dict[str, Adapter] = field(repr=False)
    """By the names of the parameters that they change."""
    on: bool = True

    def merged(self, params: Mapping[str, Tensor], *, remember: bool = True) -> Mapping[str, Tensor]:
        """Returns a read-only view of the parameters in which adapted ones are merged at each access.

        With ``remember`` the last one is kept for a next access: for views that do not outlive an update.
        """
        return MergedWeights(params, self.adapters, remember=remember)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Within it the model computes as it does without adapters."""
        self.on = False
        try:
            yield
        finally:
            self.on = True

    def stream(self) -> Iterator[tuple[str, Tensor | None]]:
        """Whole adapter tensors by their names, on rank 0; None elsewhere. Every rank must exhaust it."""
        return gather_to_root(self.sources, self.layout.shapes, self.params)

    def settings(self) -> AdapterSettings:
        """Returns what a PEFT folder says of these adapters."""
        config, targets = self.config, dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in self.tensors)
        return AdapterSettings(config.rank, config.alpha, config.rslora, config.dropout, tuple(targets))

    def sum_gradients(self) -> None:
        """Adds up the gradients of A or B over the ranks that hold a copy of it, and different parts of the weight.

        To be called when the gradients have been summed over micro-batches and data-parallel ranks. Every rank calls.
        """
        for group, params in self._copies():
            grads = [param.main_grad for param in params]  # type: ignore[attr-defined]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(flat, group=group)
            for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(summed.view_as(grad))

    def _copies(self) -> Iterator[tuple[dist.ProcessGroup, list[torch.nn.Parameter]]]:
        for of_experts, group in ((False, _tensor_group(False)), (True, _tensor_group(True))):
            found = [
                param
                for name, param in self.params.items()
                if _is_expert(name) == of_experts and tuple(param.shape) == self.layout.shapes[name]
            ]
            if found and dist.get_world_size(group) > 1:
                yield group, found


def build_lora(
    config: LoraConfig,
    chunks: Sequence[torch.nn.Module],
    params: Mapping[str, torch.nn.Parameter],
    layouts: Sequence[ShardLayout],
    *,
    rank: int,
    seed: int,
) -> Lora:
    """Freezes the model and hangs adapters on it, which start as ``config`` says. ``params``: the model's, by its layout's
    names; ``layouts``: those of all ranks, of which this is ``rank``.

    Every rank calls before Megatron's DDP is made; nothing is communicated. Raises ValueError for targets that match nothing.
    """
    own = layouts[rank]
    tensors = adapted_tensors(own.shapes, config.target_modules)
    same: dict[int, ShardLayout] = {}  # ranks share layouts
    adapted = [same.setdefault(id(layout), adapter_layout(layout, tensors, config.rank)) for layout in layouts]
    for chunk in chunks:
        chunk.requires_grad_(False)
    layout = adapted[rank]
    held = shards_by_tensor(own, frozenset(tensors))
    pairs = _new_parameters(layout, {shard.tensor: params[shard.param] for shards in held.values() for shard in shards})
    lora = Lora(config, tensors, adapted, layout, gather_sources(adapted), pairs, {})
    if config.path is None:
        _draw(layout, pairs, seed)
    else:
        load_adapters(config.path, layout, pairs)
    by_param: dict[str, list[str]] = {}
    for tensor, shards in held.items():
        by_param.setdefault(shards[0].param, []).append(tensor)
    for name, members in by_param.items():
        matrices = [pairs[part] for tensor in members for part in adapter_names(tensor)]
        lora.adapters[name] = Adapter(config.scale, [adapter_blocks(held[tensor]) for tensor in members], matrices)
    hang_adapters(lora.adapters, chunks, params, lambda: lora.on)
    return lora


def _new_parameters(layout: ShardLayout, bases: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """Makes A and B of each weight in ``bases``, on its device and in its dtype, with Megatron's marks."""
    found: dict[str, torch.nn.Parameter] = {}
    for tensor, base in bases.items():
        for name in adapter_names(tensor):
            param = torch.nn.Parameter(torch.zeros(layout.params[name], dtype=base.dtype, device=base.device))
            # Megatron leaves copies out of the gradient norm, by these two marks; ``allreduce`` is its mark of experts.
            copied = layout.params[name] == layout.shapes[name]
            param.tensor_model_parallel = True  # type: ignore[attr-defined]
            param.shared = copied and dist.get_rank(_tensor_group(_is_expert(name))) > 0  # type: ignore[attr-defined]
            param.allreduce = getattr(base, "allreduce", True)  # type: ignore[attr-defined]
            found[name] = param
    return found


def _draw(layout: ShardLayout, params: Mapping[str, torch.nn.Parameter], seed: int) -> None:
    """Draws A as PEFT does, uniformly within ±1 / sqrt(in), from seed and name: the same under every layout. B stays 0."""
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
    """The ranks over which a dense weight, or one of an expert, is split."""
    if of_experts:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()
