"""Lays out LoRA adapters A [rank, in] and B [out, rank]: a rank's rows of a matrix need these rows of B and all of A, its
columns need these columns of A and all of B.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from tepo_megatron.weights.geometry import Box, Shard, ShardLayout

ALL_LINEAR = "all-linear"
_ROUTER = "gate"


def adapter_names(tensor: str) -> tuple[str, str]:
    module = tensor.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def _module_name(tensor: str) -> str:
    return tensor.removesuffix(".weight").rpartition(".")[2]


def adapted_tensors(shapes: Mapping[str, tuple[int, ...]], targets: Collection[str]) -> list[str]:
    """``targets``: names of layers, or ``all-linear``."""
    linear = [
        tensor
        for tensor, shape in shapes.items()
        if len(shape) == 2 and ".layers." in tensor and _module_name(tensor) != _ROUTER
    ]
    known = list(dict.fromkeys(map(_module_name, linear)))
    unknown = [name for name in targets if name not in (*known, ALL_LINEAR)]
    if unknown:
        raise ValueError(
            f"model.lora.target_modules names {', '.join(unknown)}, which match nothing in this model; its linear layers are "
            f"{', '.join(known)}, and {ALL_LINEAR} means them all"
        )
    return [tensor for tensor in linear if ALL_LINEAR in targets or _module_name(tensor) in targets]


def adapter_shapes(shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[str], rank: int) -> dict[str, tuple[int, ...]]:
    """Returns A before B, in the order of the weights."""
    result: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:
        rows, columns = shapes[tensor]
        a, b = adapter_names(tensor)
        result |= {a: (rank, columns), b: (rows, rank)}
    return result


class AdapterBlock(NamedTuple):
    local_rows: slice
    param_rows: slice

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> list[AdapterBlock]:
        rows = [shard.param_box.shape[0] for shard in shards]
        ends = list(accumulate(rows))
        blocks = zip(rows, ends, shards, strict=True)
        return [cls(slice(end - count, end), shard.param_box.slices[0]) for count, end, shard in blocks]


def adapter_layouts(layouts: Sequence[ShardLayout], tensors: Collection[str], rank: int) -> list[ShardLayout]:
    different = {id(layout): layout for layout in layouts}  # ranks share layouts
    result = {key: _adapter_layout(layout, tensors, rank) for key, layout in different.items()}
    return [result[id(layout)] for layout in layouts]


def _adapter_layout(layout: ShardLayout, tensors: Collection[str], rank: int) -> ShardLayout:
    shards: list[Shard] = []
    params: dict[str, tuple[int, ...]] = {}
    for tensor, tensor_shards in layout.by_tensor(frozenset(tensors)).items():
        a, b = adapter_names(tensor)
        left, right = tensor_shards[0].box.start[1], tensor_shards[0].box.stop[1]
        params[a] = (rank, right - left)
        shards.append(Shard(a, Box((0, left), (rank, right)), a, Box.whole(params[a])))
        for shard, block in zip(tensor_shards, AdapterBlock.of(tensor_shards), strict=True):
            box = Box((shard.box.start[0], 0), (shard.box.stop[0], rank))
            shards.append(Shard(b, box, b, Box((block.local_rows.start, 0), (block.local_rows.stop, rank))))
            params[b] = (block.local_rows.stop, rank)
    return ShardLayout(adapter_shapes(layout.shapes, tensors, rank), tuple(shards), params)
