"""From the table's entries to the boxes of one rank; both sides use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tepo_megatron.bridge.architecture import ModelSpec
from tepo_megatron.bridge.geometry import Box, Shard, ShardLayout
from tepo_megatron.bridge.layouts.table import Entry, shape_of


class Run(NamedTuple):
    """Rows that stay together: ``start`` to ``stop`` of the tensor lie from row ``at`` on in the parameter."""

    start: int
    stop: int
    at: int


class Split(NamedTuple):
    """Over how many ranks a tensor is split, and which of them this one is."""

    parts: int
    rank: int


def lay_out(
    spec: ModelSpec,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    placed: Sequence[tuple[Entry, str]],
    split: Callable[[Entry], Split],
    runs: Callable[[Entry, int], Iterable[Run]],
    vocab_rows: int,
    first_row: Callable[[Entry], int] = lambda _: 0,
) -> ShardLayout:
    """The layout of a rank that holds these (entry, parameter) pairs.

    ``split`` says how a tensor's columns are divided, and ``runs`` its rows (by entry and number of rows); ``first_row`` is
    where in its parameter a tensor begins. ``vocab_rows`` is the padded number of rows that this rank has of embedding and
    head.
    """
    shards: list[Shard] = []
    params: dict[str, tuple[int, ...]] = {}
    for entry, param in placed:
        shape = shape_of(entry, spec)
        extent = (vocab_rows, *shape[1:]) if entry.placement == "vocab" else (0,) * len(shape)
        for shard in _shards(entry, param, shape, split(entry), runs, first_row(entry)):
            shards.append(shard)
            extent = tuple(max(a, b) for a, b in zip(extent, shard.at.stop, strict=True))
        # Several tensors may share a fused parameter.
        params[param] = tuple(max(a, b) for a, b in zip(extent, params.get(param, extent), strict=True))
    return ShardLayout(shapes=shapes, shards=tuple(shards), params=params)


def _shards(
    entry: Entry,
    param: str,
    shape: tuple[int, ...],
    split: Split,
    runs: Callable[[Entry, int], Iterable[Run]],
    first: int,
) -> Iterable[Shard]:
    if entry.placement == "replicated":
        whole = Box((0,) * len(shape), shape)
        yield Shard(entry.tensor, whole, param, whole)
    elif entry.placement == "columns":
        rows, width = shape[0], shape[1] // split.parts
        box = Box((0, split.rank * width), (rows, (split.rank + 1) * width))
        yield Shard(entry.tensor, box, param, Box((first, 0), (first + rows, width)))
    else:
        inner, zeros = shape[1:], (0,) * (len(shape) - 1)
        for run in runs(entry, shape[0]):
            if run.start < run.stop:
                box, at = Box((run.start, *zeros), (run.stop, *inner)), first + run.at
                yield Shard(entry.tensor, box, param, Box((at, *zeros), (at + run.stop - run.start, *inner)))
