"""From two layouts to the moves between them. Pure: every rank that has the same inputs makes the same plan."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from tepo_megatron.bridge.architecture import ModelSpec
from tepo_megatron.bridge.geometry import Box, Move, ReshardPlan, Shard, ShardLayout
from tepo_megatron.bridge.layouts import MegatronParallel, VllmParallel, megatron_ranks, vllm_ranks
from tepo_megatron.bridge.reshard.balance import Part, share_out
from tepo_megatron.bridge.reshard.boxes import coalesce, overlaps
from tepo_megatron.bridge.reshard.plan_json import digest_of
from tepo_megatron.bridge.reshard.proof import prove


class _Piece(NamedTuple):
    """``box`` of a tensor, that the destination rank's shard wants and that every one of ``owners`` (rank → shard) holds."""

    tensor: str
    destination: int
    shard: Shard
    box: Box
    owners: Mapping[int, Shard]


def reshard_plan(
    spec: ModelSpec, source: MegatronParallel, destination: VllmParallel, local: Mapping[int, int] | None = None
) -> ReshardPlan:
    """The plan from a trainer to all workers of all its servers, proved complete; the last few are kept.

    ``local`` maps destination ranks to the source rank that shares their device. Raises ValueError for a split that Megatron or
    vLLM could not make.
    """
    return _reshard_plan(spec, source, destination, tuple(sorted((local or {}).items())))


@lru_cache(maxsize=8)
def _reshard_plan(
    spec: ModelSpec, source: MegatronParallel, destination: VllmParallel, local: tuple[tuple[int, int], ...]
) -> ReshardPlan:
    sources, destinations = megatron_ranks(spec, source), vllm_ranks(spec, destination)
    digest = digest_of(spec, source, destination, local)
    plan = plan_moves(sources, destinations, server_size=destination.server_size, local=dict(local), digest=digest)
    prove(plan, sources, destinations)
    return plan


def plan_moves(
    sources: Sequence[ShardLayout],
    destinations: Sequence[ShardLayout],
    *,
    server_size: int | None = None,
    local: Mapping[int, int] | None = None,
    digest: str = "",
) -> ReshardPlan:
    """The moves that fill every shard of every destination rank, each element once.

    The bytes between ranks are the fewest possible: what a destination needs, less what its ``local`` source holds. Sources
    that hold the same share the work. ``server_size``: so many consecutive destinations hold one copy of the model (default:
    all). Raises ValueError that names a tensor which the sources do not cover.
    """
    local = dict(local or {})
    _check_ranks(local, len(sources), len(destinations))
    moves = _moves(_pieces(sources, destinations), local)
    order = _order(destinations[0].shapes, len(destinations), server_size or len(destinations))
    return ReshardPlan(tuple(sorted(moves, key=order)), len(sources), len(destinations), local, digest)


def _check_ranks(local: Mapping[int, int], num_sources: int, num_destinations: int) -> None:
    for destination, source in local.items():
        if not (0 <= destination < num_destinations and 0 <= source < num_sources):
            raise ValueError(
                f"local says that destination rank {destination} shares a device with source rank {source}, but there are "
                f"{num_destinations} destinations and {num_sources} sources"
            )


def _holders(layouts: Sequence[ShardLayout]) -> dict[str, dict[Box, dict[int, Shard]]]:
    """Tensor → box → rank → the shard that holds it. Of two equal copies on one rank (a tied head) the first is as good."""
    held: dict[str, dict[Box, dict[int, Shard]]] = defaultdict(lambda: defaultdict(dict))
    for rank, layout in enumerate(layouts):
        for shard in layout.shards:
            held[shard.tensor][shard.box].setdefault(rank, shard)
    return held


def _pieces(sources: Sequence[ShardLayout], destinations: Sequence[ShardLayout]) -> Iterator[_Piece]:
    held = _holders(sources)
    wanted: dict[str, dict[Box, list[tuple[int, Shard]]]] = defaultdict(lambda: defaultdict(list))
    for rank, layout in enumerate(destinations):
        for shard in layout.shards:
            wanted[shard.tensor][shard.box].append((rank, shard))
    for tensor, targets in wanted.items():
        owners, receivers = list(held[tensor].values()), list(targets.values())
        try:
            parts = overlaps(tuple(held[tensor]), tuple(targets))
        except ValueError as error:
            raise ValueError(f"{tensor} cannot be resharded: {error}") from None
        for i, j, box in parts:
            for destination, shard in receivers[j]:
                yield _Piece(tensor, destination, shard, box, owners[i])


def _moves(pieces: Iterable[_Piece], local: Mapping[int, int]) -> Iterator[Move]:
    """Chooses a source for every piece, and joins what can travel together."""
    boxes: dict[tuple[str, int, int, str, str], list[tuple[Box, Box]]] = defaultdict(list)
    for piece, source, box in _choose(pieces, local):
        shard = piece.owners[source]
        route = (piece.tensor, source, piece.destination, shard.param, piece.shard.param)
        ours, theirs = _within(shard.box.start, shard.at.start, box), _within(piece.shard.box.start, piece.shard.at.start, box)
        boxes[route].append((ours, theirs))
    for (tensor, source, destination, source_param, destination_param), pairs in boxes.items():
        for source_region, destination_region in coalesce(tuple(pairs)):
            yield Move(tensor, source, destination, source_param, source_region, destination_param, destination_region)


def _choose(pieces: Iterable[_Piece], local: Mapping[int, int]) -> Iterator[tuple[_Piece, int, Box]]:
    """(piece, source rank, the part of the piece's box that it gives)."""
    shared: dict[tuple[int, ...], list[_Piece]] = defaultdict(list)
    for piece in pieces:
        near = local.get(piece.destination)
        if near is not None and near in piece.owners:
            yield piece, near, piece.box
        else:
            shared[tuple(piece.owners)].append(piece)
    for same in shared.values():
        same.sort(key=lambda piece: piece.destination)
    parts = {
        owners: [Part((owners, at), piece.destination, *_rows_and_size(piece.box)) for at, piece in enumerate(same)]
        for owners, same in shared.items()
    }
    for (owners, at), source, start, stop in share_out(parts, defaultdict(int)):
        piece = shared[owners][at]
        yield piece, source, _cut(piece.box, start, stop)


@lru_cache(maxsize=4096)
def _rows_and_size(box: Box) -> tuple[int, int]:
    rows, *inner = box.shape
    return rows, math.prod(inner)


@lru_cache(maxsize=4096)
def _cut(box: Box, start: int, stop: int) -> Box:
    """Rows ``start`` to ``stop`` of a box, counted from its first."""
    first, *inner = box.start
    return Box((first + start, *inner), (first + stop, *box.stop[1:]))


@lru_cache(maxsize=4096)
def _within(tensor_start: tuple[int, ...], param_start: tuple[int, ...], box: Box) -> Box:
    """Where this box of a tensor lies in a parameter that has the tensor's ``tensor_start`` at ``param_start``."""
    return box.relative_to(tuple(a - b for a, b in zip(tensor_start, param_start, strict=True)))


def _order(tensors: Iterable[str], num_destinations: int, server_size: int) -> Callable[[Move], tuple[int, ...]]:
    """Sort key: by layer, tensor, source, destination; each server begins at another layer.

    Were all servers to begin at the first layer, one pipeline stage of the trainer at a time would send to all of them, and the
    others would wait.
    """
    layers = [list(names) for _, names in groupby(tensors, key=layer_of)]
    place = {name: (number, at) for number, names in enumerate(layers) for at, name in enumerate(names)}
    numbered = [number for number, names in enumerate(layers) if layer_of(names[0]) is not None]
    servers = -(-num_destinations // server_size)
    begin = [0, *(numbered[len(numbered) * server // servers] if numbered else 0 for server in range(1, servers))]

    def key(move: Move) -> tuple[int, ...]:
        layer, at = place[move.tensor]
        return (
            (layer - begin[move.destination // server_size]) % len(layers),
            at,
            move.source,
            move.destination,
            *move.destination_region.box.start,
        )

    return key


def layer_of(tensor: str) -> int | None:
    """The layer that a Hugging Face tensor belongs to; None for embedding, final norm and head."""
    match = re.search(r"\.layers\.(\d+)\.", tensor)
    return int(match[1]) if match else None
