"""Lays out LoRA adapters over the ranks of Megatron-Core: wherever a part of a matrix lies, its adapter's parts lie too.

The adapter of a matrix [out, in] is A [rank, in] and B [out, rank], and adds ``scale · B · A`` to it. A rank that holds some
rows of the matrix needs those rows of B and all of A; one that holds some columns needs those of A and all of B. So the layout
of the adapters follows from that of the weights, whatever the split.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from tepo_megatron.weights.geometry import Box, Shard, ShardLayout

ALL_LINEAR = "all-linear"
_ROUTER = "gate"
"""The last name of the router of a block of experts, which has a matrix but is no linear layer that is adapted."""


class AdapterNames(NamedTuple):
    """The tensors of one adapter, named as PEFT names them, without its prefix."""

    a: str
    b: str


def adapter_names(tensor: str) -> AdapterNames:
    """Returns the names of the adapter of ``….q_proj.weight``: ``….q_proj.lora_A.weight`` and ``….q_proj.lora_B.weight``."""
    module = tensor.removesuffix(".weight")
    return AdapterNames(f"{module}.lora_A.weight", f"{module}.lora_B.weight")


def module_name(tensor: str) -> str:
    """Returns the last name of a weight's layer: ``q_proj`` of ``model.layers.0.self_attn.q_proj.weight``."""
    return tensor.removesuffix(".weight").rpartition(".")[2]


def linear_modules(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Returns the names of the model's linear layers that can have adapters, each once; embedding, head and router cannot."""
    return list(dict.fromkeys(module_name(tensor) for tensor, shape in shapes.items() if _is_linear(tensor, shape)))


def adapted_tensors(shapes: Mapping[str, tuple[int, ...]], targets: Collection[str]) -> list[str]:
    """Returns the weights that have adapters, for names of layers or ``all-linear``.

    Raises ValueError for a name that no linear layer of the model has, with those that there are.
    """
    known = linear_modules(shapes)
    unknown = [name for name in targets if name not in (*known, ALL_LINEAR)]
    if unknown:
        raise ValueError(
            f"model.lora.target_modules names {', '.join(unknown)}, which match nothing in this model; its linear layers are "
            f"{', '.join(known)}, and {ALL_LINEAR} means them all"
        )
    chosen = known if ALL_LINEAR in targets else targets
    return [tensor for tensor, shape in shapes.items() if _is_linear(tensor, shape) and module_name(tensor) in chosen]


def _is_linear(tensor: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and ".layers." in tensor and module_name(tensor) != _ROUTER


def adapter_shapes(shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[str], rank: int) -> dict[str, tuple[int, ...]]:
    """Returns every adapter tensor of the whole model with its shape, A before B, in the order of the weights."""
    found: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:
        rows, columns = shapes[tensor]
        names = adapter_names(tensor)
        found |= {names.a: (rank, columns), names.b: (rows, rank)}
    return found


class AdapterBlock(NamedTuple):
    """Rows ``own`` of an adapter's local B belong to rows ``at`` of the (fused) parameter."""

    own: slice
    at: slice


def adapter_blocks(shards: Iterable[Shard]) -> list[AdapterBlock]:
    """Returns where the rows of an adapter's local B belong, for the shards of one weight on one rank, in their order."""
    blocks, row = [], 0
    for shard in shards:
        count = shard.at.shape[0]
        blocks.append(AdapterBlock(slice(row, row + count), shard.at.slices[0]))
        row += count
    return blocks


def adapter_layout(layout: ShardLayout, tensors: Collection[str], rank: int) -> ShardLayout:
    """Returns the layout of the adapters of ``tensors`` on a trainer rank that holds its weights by ``layout``.

    The parameters have the names of their tensors. ``rank`` is the adapters' inner dimension. The rank of a world may hold
    nothing of some weights, and has nothing of their adapters then.
    """
    wanted = frozenset(tensors)
    shards: list[Shard] = []
    params: dict[str, tuple[int, ...]] = {}
    for tensor, held in shards_by_tensor(layout, wanted).items():
        names = adapter_names(tensor)
        left, right = held[0].box.start[1], held[0].box.stop[1]
        params[names.a] = (rank, right - left)
        shards.append(Shard(names.a, Box((0, left), (rank, right)), names.a, Box((0, 0), (rank, right - left))))
        for shard, block in zip(held, adapter_blocks(held), strict=True):
            box = Box((shard.box.start[0], 0), (shard.box.stop[0], rank))
            shards.append(Shard(names.b, box, names.b, Box((block.own.start, 0), (block.own.stop, rank))))
            params[names.b] = (block.own.stop, rank)
    return ShardLayout(adapter_shapes(layout.shapes, tensors, rank), tuple(shards), params)


def shards_by_tensor(layout: ShardLayout, tensors: Collection[str]) -> dict[str, list[Shard]]:
    """Returns a rank's shards of each of these tensors that it holds a part of."""
    found: dict[str, list[Shard]] = {}
    for shard in layout.shards:
        if shard.tensor in tensors:
            found.setdefault(shard.tensor, []).append(shard)
    return found
