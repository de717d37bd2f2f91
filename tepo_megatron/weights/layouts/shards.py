"""Expands the table's parameter mappings into the boxes of one rank, for both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.geometry import Box, Shard, ShardLayout
from tepo_megatron.weights.layouts.table import ParamMapping, shape_of


class RowBlock(NamedTuple):
    """Rows ``start`` to ``stop`` of a tensor, which lie together in the parameter, from its row ``param_row`` on."""

    start: int
    stop: int
    param_row: int


class Split(NamedTuple):
    """The number of ranks that a tensor is split over, and the number of this rank among them."""

    size: int
    rank: int


def lay_out(
    spec: ModelSpec,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    held: Sequence[tuple[ParamMapping, str]],
    split: Callable[[ParamMapping], Split],
    row_blocks: Callable[[ParamMapping, int], Iterable[RowBlock]],
    vocab_rows: int,
    first_row: Callable[[ParamMapping], int] = lambda _: 0,
) -> ShardLayout:
    """Returns the layout of a rank that holds these (mapping, name of the rank's parameter) pairs.

    ``split`` says how a tensor's columns are divided, ``row_blocks`` how its rows are (by mapping and number of rows), and
    ``first_row`` at which row of its parameter a tensor begins. ``vocab_rows`` is the padded number of rows that this rank has
    of the embedding and of the head.
    """
    shards: list[Shard] = []
    params: dict[str, tuple[int, ...]] = {}
    for mapping, param in held:
        shape = shape_of(mapping, spec)
        extent = (vocab_rows, *shape[1:]) if mapping.split_kind == "vocab" else (0,) * len(shape)
        for shard in _shards(mapping, param, shape, split(mapping), row_blocks, first_row(mapping)):
            shards.append(shard)
            extent = tuple(max(a, b) for a, b in zip(extent, shard.at.stop, strict=True))
        # Several tensors may share a fused parameter.
        params[param] = tuple(max(a, b) for a, b in zip(extent, params.get(param, extent), strict=True))
    return ShardLayout(shapes=shapes, shards=tuple(shards), params=params)


def _shards(
    mapping: ParamMapping,
    param: str,
    shape: tuple[int, ...],
    split: Split,
    row_blocks: Callable[[ParamMapping, int], Iterable[RowBlock]],
    first: int,
) -> Iterable[Shard]:
    """Yields the boxes of one tensor on this rank; rows count from ``first`` in the parameter."""
    if mapping.split_kind == "replicated":
        whole = Box((0,) * len(shape), shape)
        yield Shard(mapping.tensor, whole, param, whole)
    elif mapping.split_kind == "columns":
        rows, width = shape[0], shape[1] // split.size
        box = Box((0, split.rank * width), (rows, (split.rank + 1) * width))
        yield Shard(mapping.tensor, box, param, Box((first, 0), (first + rows, width)))
    else:
        inner, zeros = shape[1:], (0,) * (len(shape) - 1)
        for block in row_blocks(mapping, shape[0]):
            if block.start < block.stop:  # empty on a rank whose rows are all padding
                box, at = Box((block.start, *zeros), (block.stop, *inner)), first + block.param_row
                yield Shard(mapping.tensor, box, param, Box((at, *zeros), (at + block.stop - block.start, *inner)))
