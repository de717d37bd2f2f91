"""Plans the moves between two layouts; ranks with the same inputs make the same plan."""

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.geometry import Box, Move, Region, ReshardPlan, Shard, ShardLayout
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel

_TOLERANCE = 0.01
"""A smaller share of a rank's load is not divided."""

_FORMAT = "tepo-reshard-plan"
_VERSION = 2  # increase with every change of the planner


class _BoxRequest(NamedTuple):
    tensor: str
    destination: int
    shard: Shard
    box: Box
    owners: Mapping[int, Shard]
    holders: tuple[int, ...]  # the owners' keys
    rows: int
    row_size: int


_Part = tuple[_BoxRequest, int, int, int]  # request, source rank, first row, end of rows


def reshard_plan(
    spec: ModelSpec, source: MegatronParallel, destination: VllmParallel, local: Mapping[int, int] | None = None
) -> ReshardPlan:
    """Returns the proved plan from a trainer to all servers' workers; caches 8. Raises ValueError for ranks that ``local`` or
    the model do not fit.
    """
    return _reshard_plan(spec, source, destination, tuple(sorted((local or {}).items())))


@lru_cache(maxsize=8)
def _reshard_plan(
    spec: ModelSpec, source: MegatronParallel, destination: VllmParallel, local: tuple[tuple[int, int], ...]
) -> ReshardPlan:
    """Minimizes the bytes sent; sources with the same parts share the work."""
    sources, destinations, near = source.layouts(spec), destination.layouts(spec), dict(local)
    for worker, rank in local:
        if not (0 <= worker < len(destinations) and 0 <= rank < len(sources)):
            raise ValueError(
                f"local says that destination rank {worker} shares a device with source rank {rank}, but there are "
                f"{len(destinations)} destinations and {len(sources)} sources"
            )
    inputs = json.dumps([_FORMAT, _VERSION, [spec, source, destination, local]], sort_keys=True, default=_plain)
    order = _order(destinations[0].shapes, destination)
    moves = tuple(sorted(_moves(_requests(sources, destinations), near), key=order))
    plan = ReshardPlan(moves, len(sources), len(destinations), near, hashlib.sha256(inputs.encode()).hexdigest())
    plan.prove(sources, destinations)
    return plan


def reshard_traffic(
    spec: ModelSpec, source: MegatronParallel, destination: VllmParallel, local: Mapping[int, int] | None = None
) -> tuple[int, Counter[tuple[int, int]]]:
    """Returns moves, at most one for each tensor and pair of ranks, and (source, destination) → elements between devices."""
    near, sources, destinations = local or {}, source.layouts(spec), destination.layouts(spec)
    routes, elements = set[tuple[str, int, int]](), Counter[tuple[int, int]]()
    for request, rank, start, stop in _choose_sources(_requests(sources, destinations), near):
        routes.add((request.tensor, rank, request.destination))
        if near.get(request.destination) != rank:
            elements[rank, request.destination] += (stop - start) * request.row_size
    return len(routes), elements


def _shards_by_box(layouts: Sequence[ShardLayout]) -> dict[str, dict[Box, list[tuple[int, Shard]]]]:
    shards: dict[str, dict[Box, list[tuple[int, Shard]]]] = defaultdict(lambda: defaultdict(list))
    for rank, layout in enumerate(layouts):
        for shard in layout.shards:
            shards[shard.tensor][shard.box].append((rank, shard))
    return shards


def _requests(sources: Sequence[ShardLayout], destinations: Sequence[ShardLayout]) -> Iterator[_BoxRequest]:
    owners = _shards_by_box(sources)
    for tensor, receivers in _shards_by_box(destinations).items():
        try:
            common = _overlaps(tuple(owners[tensor]), tuple(receivers))
        except ValueError as error:
            raise ValueError(f"{tensor} cannot be resharded: {error}") from None
        for source_box, destination_box, box in common:
            sources_of, (rows, *inner) = dict(owners[tensor][source_box]), box.shape
            shared = box, sources_of, tuple(sources_of), rows, math.prod(inner)
            for destination, shard in receivers[destination_box]:
                yield _BoxRequest(tensor, destination, shard, *shared)


def _moves(requests: Iterable[_BoxRequest], local: Mapping[int, int]) -> Iterator[Move]:
    boxes: dict[tuple[str, int, int, str, str], list[tuple[Box, Box]]] = defaultdict(list)
    for request, source, start, stop in _choose_sources(requests, local):
        (first, *inner), shards = request.box.start, (request.owners[source], request.shard)
        box = Box((first + start, *inner), (first + stop, *request.box.stop[1:]))
        in_source, in_destination = (shard.in_param(box) for shard in shards)
        route = (request.tensor, source, request.destination, shards[0].param, shards[1].param)
        boxes[route].append((in_source, in_destination))
    for (tensor, source, destination, source_param, destination_param), pairs in boxes.items():
        for source_region, destination_region in _coalesce(tuple(pairs)):
            yield Move(tensor, source, destination, source_param, source_region, destination_param, destination_region)


def _choose_sources(requests: Iterable[_BoxRequest], local: Mapping[int, int]) -> Iterator[_Part]:
    shared: dict[tuple[int, ...], list[_BoxRequest]] = defaultdict(list)
    for request in requests:
        local_source = local.get(request.destination)
        if local_source is not None and local_source in request.owners:
            yield request, local_source, 0, request.rows
        else:
            shared[request.holders].append(request)
    # Ordered by receiver, because _assign_senders gives consecutive items to one owner: each receiver has few senders.
    for group in shared.values():
        group.sort(key=lambda request: request.destination)
    yield from _assign_senders(shared)


def _order(tensors: Iterable[str], parallel: VllmParallel) -> Callable[[Move], tuple[int, ...]]:
    """Each server starts at another layer, so that not all wait for one stage."""
    layers = [list(names) for _, names in groupby(tensors, key=_layer_of)]
    position = {name: (number, index) for number, names in enumerate(layers) for index, name in enumerate(names)}
    numbered = [number for number, names in enumerate(layers) if _layer_of(names[0]) is not None]
    servers = parallel.replicas
    first_layers = [0, *(numbered[len(numbered) * server // servers] if numbered else 0 for server in range(1, servers))]

    def key(move: Move) -> tuple[int, ...]:
        layer, index = position[move.tensor]
        return (
            (layer - first_layers[move.destination // parallel.server_size]) % len(layers),
            index,
            move.source,
            move.destination,
            *move.destination_region.box.start,
        )

    return key


def _layer_of(tensor: str) -> int | None:
    match = re.search(r"\.layers\.(\d+)\.", tensor)
    return int(match[1]) if match else None


def _assign_senders(items: Mapping[tuple[int, ...], Sequence[_BoxRequest]]) -> Iterator[_Part]:
    """Negligible sets, such as norms, go to a rank that sends to the receiver anyway."""
    loads, routes = Counter[int](), set[tuple[int, int]]()
    amounts = {owners: sum(item.rows * item.row_size for item in group) for owners, group in items.items()}
    for owners, group in sorted(items.items(), key=lambda pair: (len(pair[0]), -amounts[pair[0]], pair[0])):
        order = sorted(owners, key=lambda owner: (loads[owner], owner))
        amount = amounts[owners]
        level = _water_level([loads[owner] for owner in order], amount)
        assigned: Iterable[_Part]
        if amount <= _TOLERANCE * loads[order[-1]]:
            assigned = (
                (item, next((owner for owner in order if (owner, item.destination) in routes), order[0]), 0, item.rows)
                for item in group
            )
        else:
            assigned = _assign_in_order(order, [level - loads[owner] for owner in order], group, slack=_TOLERANCE * level)
        # A generator assigns the items, so that it sees the routes that this loop adds before it chooses the next owner.
        for item, owner, start, stop in assigned:
            loads[owner] += (stop - start) * item.row_size
            routes.add((owner, item.destination))
            yield item, owner, start, stop


def _water_level(loads: Sequence[int], amount: int) -> float:
    """Water-filling: over the lowest ``count`` loads the level is (sum + amount) / count."""
    total = float(amount)
    for count, load in enumerate(loads, 1):
        total += load
        if count == len(loads) or total / count <= loads[count]:
            return total / count
    raise AssertionError("an item has an owner")


def _assign_in_order(
    order: Sequence[int], capacities: Sequence[float], items: Sequence[_BoxRequest], *, slack: float
) -> Iterator[_Part]:
    """Divides an item if more than ``slack`` elements would be too much."""
    index, capacity = 0, capacities[0]
    for item in items:
        start, row_size = 0, item.row_size
        while start < item.rows:
            left = item.rows - start
            is_last = index == len(order) - 1
            fits = left * row_size <= capacity + slack
            rows = left if is_last or fits else min(left, round(capacity / row_size))
            if not is_last and (rows <= 0 or capacity <= slack):
                # The excess (a negative capacity) or rest of this owner carries over to the next one.
                index += 1
                capacity += capacities[index]
                continue
            yield item, order[index], start, start + rows
            start += rows
            capacity -= rows * row_size


def _plain(value: Any) -> Any:
    return [value.start, value.stop] if isinstance(value, range) else vars(value)


@lru_cache(maxsize=4096)
def _overlaps(sources: tuple[Box, ...], destinations: tuple[Box, ...]) -> tuple[tuple[Box, Box, Box], ...]:
    """Returns (source, destination, common box). Raises ValueError if sources overlap or leave gaps."""
    for one, other in Box.overlaps(sources):
        raise ValueError(f"the parts {one} and {other} of one tensor overlap without being equal")
    result: list[tuple[Box, Box, Box]] = []
    for destination in destinations:
        common = [(source, destination, box) for source in sources if (box := source.intersection(destination)) is not None]
        # The sources are disjoint, so that the sizes of the intersections add up to what is covered.
        covered = sum(box.numel for _, _, box in common)
        if covered != destination.numel:
            raise ValueError(f"the source ranks together hold {covered} of {destination.numel} elements of {destination}")
        result += common
    return tuple(result)


@lru_cache(maxsize=4096)
def _coalesce(pairs: tuple[tuple[Box, Box], ...]) -> tuple[tuple[Region, Region], ...]:
    merged: list[tuple[Box, Box]] = []
    for source, destination in sorted(pairs, key=lambda pair: pair[1].start):
        if merged and _adjoin(merged[-1][0], source) and _adjoin(merged[-1][1], destination):
            first = merged.pop()
            source, destination = Box(first[0].start, source.stop), Box(first[1].start, destination.stop)
        merged.append((source, destination))
    return tuple(regions for _, same in groupby(merged, key=_outline) for regions in _regions(list(same)))


def _adjoin(above: Box, below: Box) -> bool:
    return above.stop[0] == below.start[0] and above.start[1:] == below.start[1:] and above.stop[1:] == below.stop[1:]


def _outline(pair: tuple[Box, Box]) -> tuple[object, ...]:
    source, destination = pair
    return source.shape[0], source.start[1:], source.stop[1:], destination.start[1:], destination.stop[1:]


def _regions(pairs: Sequence[tuple[Box, Box]]) -> Iterator[tuple[Region, Region]]:
    def step(n: int) -> tuple[int, int]:
        (before, to_before), (after, to_after) = pairs[n - 1], pairs[n]
        return after.start[0] - before.start[0], to_after.start[0] - to_before.start[0]

    first = 0
    while first < len(pairs):
        (source, destination), end = pairs[first], first + 1
        # Pairs are ordered by destination, so that the source may step back or overlap; then the pair stays alone.
        if end < len(pairs) and min(step(end)) >= source.shape[0]:
            while end < len(pairs) and step(end) == step(first + 1):
                end += 1
        steps = step(first + 1) if end - first > 1 else (0, 0)
        yield Region(source, end - first, steps[0]), Region(destination, end - first, steps[1])
        first = end
