"""Makes the moves between two layouts. All functions are pure: ranks with the same inputs make the same plan."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.geometry import Box, Move, ReshardPlan, Shard, ShardLayout, coalesce, overlaps
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel, megatron_ranks, vllm_ranks
from tepo_megatron.weights.reshard.plan_json import digest_of
from tepo_megatron.weights.reshard.proof import prove


class _BoxRequest(NamedTuple):
    """``box`` of a tensor that the destination rank's shard needs and that each of ``owners`` (rank → shard) holds."""

    tensor: str
    destination: int
    shard: Shard
    box: Box
    owners: Mapping[int, Shard]


def reshard_plan(
    spec: ModelSpec, source: MegatronParallel, destination: VllmParallel, local: Mapping[int, int] | None = None
) -> ReshardPlan:
    """Returns the plan from a trainer to all workers of all its servers, proved complete. The last 8 plans are cached.

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
    """Plans the moves that write every element of every destination shard once.

    The bytes between ranks are the fewest possible: what a destination needs, less what its ``local`` source holds. Sources
    that hold the same parts share the work. ``server_size`` is the number of consecutive destinations that hold one copy of the
    model; by default all do. Raises ValueError that names a tensor which the sources do not cover.
    """
    local = dict(local or {})
    _check_ranks(local, len(sources), len(destinations))
    moves = _moves(_requests(sources, destinations), local)
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
    """Returns tensor → box → rank → the shard with it. Of two equal copies on one rank (a tied head) it takes the first."""
    held: dict[str, dict[Box, dict[int, Shard]]] = defaultdict(lambda: defaultdict(dict))
    for rank, layout in enumerate(layouts):
        for shard in layout.shards:
            held[shard.tensor][shard.box].setdefault(rank, shard)
    return held


def _requests(sources: Sequence[ShardLayout], destinations: Sequence[ShardLayout]) -> Iterator[_BoxRequest]:
    """Divides every destination shard into the boxes that source shards hold whole."""
    held = _holders(sources)
    wanted: dict[str, dict[Box, list[tuple[int, Shard]]]] = defaultdict(lambda: defaultdict(list))
    for rank, layout in enumerate(destinations):
        for shard in layout.shards:
            wanted[shard.tensor][shard.box].append((rank, shard))
    for tensor, targets in wanted.items():
        owners, receivers = list(held[tensor].values()), list(targets.values())
        try:
            common = overlaps(tuple(held[tensor]), tuple(targets))
        except ValueError as error:
            raise ValueError(f"{tensor} cannot be resharded: {error}") from None
        for i, j, box in common:
            for destination, shard in receivers[j]:
                yield _BoxRequest(tensor, destination, shard, box, owners[i])


def _moves(requests: Iterable[_BoxRequest], local: Mapping[int, int]) -> Iterator[Move]:
    """Chooses a source for every request, and joins the boxes that can travel as one region."""
    boxes: dict[tuple[str, int, int, str, str], list[tuple[Box, Box]]] = defaultdict(list)
    for request, source, box in _choose_sources(requests, local):
        held, wanted = request.owners[source], request.shard
        route = (request.tensor, source, request.destination, held.param, wanted.param)
        pair = _map_to_param(held.box.start, held.at.start, box), _map_to_param(wanted.box.start, wanted.at.start, box)
        boxes[route].append(pair)
    for (tensor, source, destination, source_param, destination_param), pairs in boxes.items():
        for source_region, destination_region in coalesce(tuple(pairs)):
            yield Move(tensor, source, destination, source_param, source_region, destination_param, destination_region)


def _choose_sources(requests: Iterable[_BoxRequest], local: Mapping[int, int]) -> Iterator[tuple[_BoxRequest, int, Box]]:
    """Yields (request, source rank, the part of the request's box that this source sends)."""
    shared: dict[tuple[int, ...], list[_BoxRequest]] = defaultdict(list)
    for request in requests:
        near = local.get(request.destination)
        if near is not None and near in request.owners:
            yield request, near, request.box
        else:
            shared[tuple(request.owners)].append(request)
    # Ordered by receiver, because assign_senders gives consecutive items to one owner: each receiver has few senders.
    for group in shared.values():
        group.sort(key=lambda request: request.destination)
    items = {
        owners: [SendItem((owners, n), request.destination, *_rows_and_size(request.box)) for n, request in enumerate(group)]
        for owners, group in shared.items()
    }
    for (owners, n), source, start, stop in assign_senders(items, defaultdict(int)):
        request = shared[owners][n]
        yield request, source, _cut_rows(request.box, start, stop)


@lru_cache(maxsize=4096)
def _rows_and_size(box: Box) -> tuple[int, int]:
    """Returns the number of rows and the elements of one. Cached, as the two below, because all layers have the same boxes."""
    rows, *inner = box.shape
    return rows, math.prod(inner)


@lru_cache(maxsize=4096)
def _cut_rows(box: Box, start: int, stop: int) -> Box:
    """Returns rows ``start`` to ``stop`` of a box, counted from its first row."""
    first, *inner = box.start
    return Box((first + start, *inner), (first + stop, *box.stop[1:]))


@lru_cache(maxsize=4096)
def _map_to_param(tensor_start: tuple[int, ...], param_start: tuple[int, ...], box: Box) -> Box:
    """Maps a box of a tensor to a parameter in which the tensor's element ``tensor_start`` lies at ``param_start``."""
    return box.relative_to(tuple(a - b for a, b in zip(tensor_start, param_start, strict=True)))


def _order(tensors: Iterable[str], num_destinations: int, server_size: int) -> Callable[[Move], tuple[int, ...]]:
    """Returns the sort key of moves: by layer, tensor, source and destination, where each server begins at another layer.

    If all servers began at the first layer, one pipeline stage of the trainer at a time would send to all of them, and the
    other stages would wait.
    """
    layers = [list(names) for _, names in groupby(tensors, key=layer_of)]
    position = {name: (number, at) for number, names in enumerate(layers) for at, name in enumerate(names)}
    numbered = [number for number, names in enumerate(layers) if layer_of(names[0]) is not None]
    servers = -(-num_destinations // server_size)
    begin = [0, *(numbered[len(numbered) * server // servers] if numbered else 0 for server in range(1, servers))]

    def key(move: Move) -> tuple[int, ...]:
        layer, at = position[move.tensor]
        return (
            (layer - begin[move.destination // server_size]) % len(layers),
            at,
            move.source,
            move.destination,
            *move.destination_region.box.start,
        )

    return key


def layer_of(tensor: str) -> int | None:
    """Returns the layer that a Hugging Face tensor belongs to; None for embedding, final norm and head."""
    match = re.search(r"\.layers\.(\d+)\.", tensor)
    return int(match[1]) if match else None


TOLERANCE = 0.01
"""Share of a rank's load that is too small to divide an item for, or to open a connection for."""


class SendItem(NamedTuple):
    """``rows`` rows of ``row_size`` elements that ``receiver`` needs; ``key`` is the caller's: (the owners, a number)."""

    key: tuple[tuple[int, ...], int]
    receiver: int
    rows: int
    row_size: int


class Assignment(NamedTuple):
    """``owner`` sends rows ``start`` to ``stop`` of the item ``key``."""

    key: tuple[tuple[int, ...], int]
    owner: int
    start: int
    stop: int


def assign_senders(
    items: Mapping[tuple[int, ...], Sequence[SendItem]], loads: MutableMapping[int, int]
) -> Iterator[Assignment]:
    """Divides items among the ranks that hold them, so that all ranks send as nearly as possible the same number of elements.

    ``items`` maps a set of owners to the items that any of them can send. ``loads`` counts the elements that each rank sends;
    the assigned ones are added. The items with the fewest owners are assigned first, among equally many owners the largest
    amount, and the others fill up. Owners take the items in their order, one owner after the other; an item is divided between
    two owners where the first one is full. With items ordered by receiver each receiver thus has few senders, and the senders
    work at the same time. Items that are negligible together, such as norms, which all tensor-parallel ranks hold, are assigned
    to a rank that sends to the receiver anyway.
    """
    routes: set[tuple[int, int]] = set()
    amounts = {owners: sum(item.rows * item.row_size for item in group) for owners, group in items.items()}
    for owners, group in sorted(items.items(), key=lambda pair: (len(pair[0]), -amounts[pair[0]], pair[0])):
        order = sorted(owners, key=lambda owner: (loads[owner], owner))
        amount = amounts[owners]
        level = _water_level([loads[owner] for owner in order], amount)
        if amount <= TOLERANCE * loads[order[-1]]:
            assigned = _assign_whole(order, group, routes)
        else:
            assigned = _assign_in_order(order, [level - loads[owner] for owner in order], group, slack=TOLERANCE * level)
        # A generator assigns the items, so that it sees the routes that this loop adds before it chooses the next owner.
        for assignment, item in assigned:
            loads[assignment.owner] += (assignment.stop - assignment.start) * item.row_size
            routes.add((assignment.owner, item.receiver))
            yield assignment


def _water_level(loads: Sequence[int], amount: int) -> float:
    """Returns the load up to which owners are filled if ``amount`` always goes to the least busy ones; ``loads`` ascend.

    This is water-filling with the loads as heights of columns. Over the lowest ``count`` columns the level is (their sum +
    amount) / count; it is the right count as soon as the next column is not below that level.
    """
    total = float(amount)
    for count, load in enumerate(loads, 1):
        total += load
        if count == len(loads) or total / count <= loads[count]:
            return total / count
    raise AssertionError("an item has an owner")


def _assign_whole(
    order: Sequence[int], items: Sequence[SendItem], routes: Set[tuple[int, int]]
) -> Iterator[tuple[Assignment, SendItem]]:
    """Assigns undivided items to the least busy owner that already sends to the receiver, or else to the least busy one."""
    for item in items:
        owner = next((owner for owner in order if (owner, item.receiver) in routes), order[0])
        yield Assignment(item.key, owner, 0, item.rows), item


def _assign_in_order(
    order: Sequence[int], capacities: Sequence[float], items: Sequence[SendItem], *, slack: float
) -> Iterator[tuple[Assignment, SendItem]]:
    """Fills one owner after the other up to its capacity in elements (a column below the water level), dividing items by rows.

    An owner may take up to ``slack`` too much instead of dividing an item. The last one takes what is left.
    """
    index, capacity = 0, capacities[0]
    for item in items:
        start = 0
        while start < item.rows:
            left = item.rows - start
            is_last = index == len(order) - 1
            fits = left * item.row_size <= capacity + slack
            rows = left if is_last or fits else min(left, round(capacity / item.row_size))
            if not is_last and (rows <= 0 or capacity <= slack):
                # What this owner took too much (a negative capacity) or too little is carried over to the next one.
                index += 1
                capacity += capacities[index]
                continue
            yield Assignment(item.key, order[index], start, start + rows), item
            start += rows
            capacity -= rows * item.row_size
