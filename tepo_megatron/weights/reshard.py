"""Plans the moves between two layouts. Ranks with the same inputs make the same plan."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, NamedTuple

from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.geometry import (
    Box,
    Move,
    Region,
    ReshardPlan,
    Shard,
    ShardLayout,
    coalesce,
    overlapping_pairs,
    overlaps,
)
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel, megatron_ranks, vllm_ranks

_TOLERANCE = 0.01
"""A smaller share of a rank's load is not divided."""

_FORMAT = "tepo-reshard-plan"

_VERSION = 2  # increase with every change of file format or planner


class _BoxRequest(NamedTuple):
    tensor: str
    destination: int
    shard: Shard
    box: Box
    owners: Mapping[int, Shard]


def reshard_plan(
    spec: ModelSpec, source: MegatronParallel, destination: VllmParallel, local: Mapping[int, int] | None = None
) -> ReshardPlan:
    """Returns the proved plan from a trainer to all workers of all its servers; caches 8.

    ``local``: destination rank → the source rank on the same device.
    """
    return _reshard_plan(spec, source, destination, tuple(sorted((local or {}).items())))


@lru_cache(maxsize=8)
def _reshard_plan(
    spec: ModelSpec, source: MegatronParallel, destination: VllmParallel, local: tuple[tuple[int, int], ...]
) -> ReshardPlan:
    sources, destinations = megatron_ranks(spec, source), vllm_ranks(spec, destination)
    digest = _digest_of(spec, source, destination, local)
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
    """Minimizes the bytes sent; sources with the same parts share the work.

    ``server_size``: number of consecutive destinations with one copy of the model (default: all). Raises ValueError naming a
    tensor that the sources do not cover.
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
    holders: dict[str, dict[Box, dict[int, Shard]]] = defaultdict(lambda: defaultdict(dict))
    for rank, layout in enumerate(layouts):
        for shard in layout.shards:
            holders[shard.tensor][shard.box].setdefault(rank, shard)
    return holders


def _requests(sources: Sequence[ShardLayout], destinations: Sequence[ShardLayout]) -> Iterator[_BoxRequest]:
    holders = _holders(sources)
    needed: dict[str, dict[Box, list[tuple[int, Shard]]]] = defaultdict(lambda: defaultdict(list))
    for rank, layout in enumerate(destinations):
        for shard in layout.shards:
            needed[shard.tensor][shard.box].append((rank, shard))
    for tensor, targets in needed.items():
        owners, receivers = list(holders[tensor].values()), list(targets.values())
        try:
            common = overlaps(tuple(holders[tensor]), tuple(targets))
        except ValueError as error:
            raise ValueError(f"{tensor} cannot be resharded: {error}") from None
        for i, j, box in common:
            for destination, shard in receivers[j]:
                yield _BoxRequest(tensor, destination, shard, box, owners[i])


def _moves(requests: Iterable[_BoxRequest], local: Mapping[int, int]) -> Iterator[Move]:
    boxes: dict[tuple[str, int, int, str, str], list[tuple[Box, Box]]] = defaultdict(list)
    for request, source, box in _choose_sources(requests, local):
        source_shard, destination_shard = request.owners[source], request.shard
        route = (request.tensor, source, request.destination, source_shard.param, destination_shard.param)
        pair = (
            _map_to_param(source_shard.box.start, source_shard.param_box.start, box),
            _map_to_param(destination_shard.box.start, destination_shard.param_box.start, box),
        )
        boxes[route].append(pair)
    for (tensor, source, destination, source_param, destination_param), pairs in boxes.items():
        for source_region, destination_region in coalesce(tuple(pairs)):
            yield Move(tensor, source, destination, source_param, source_region, destination_param, destination_region)


def _choose_sources(requests: Iterable[_BoxRequest], local: Mapping[int, int]) -> Iterator[tuple[_BoxRequest, int, Box]]:
    shared: dict[tuple[int, ...], list[_BoxRequest]] = defaultdict(list)
    for request in requests:
        local_source = local.get(request.destination)
        if local_source is not None and local_source in request.owners:
            yield request, local_source, request.box
        else:
            shared[tuple(request.owners)].append(request)
    # Ordered by receiver, because _assign_senders gives consecutive items to one owner: each receiver has few senders.
    for group in shared.values():
        group.sort(key=lambda request: request.destination)
    items = {
        owners: [_SendItem((owners, n), request.destination, *_rows_and_size(request.box)) for n, request in enumerate(group)]
        for owners, group in shared.items()
    }
    for (owners, n), source, start, stop in _assign_senders(items, defaultdict(int)):
        request = shared[owners][n]
        yield request, source, _cut_rows(request.box, start, stop)


@lru_cache(maxsize=4096)
def _rows_and_size(box: Box) -> tuple[int, int]:
    """Cached, like the next two: layers have the same boxes."""
    rows, *inner = box.shape
    return rows, math.prod(inner)


@lru_cache(maxsize=4096)
def _cut_rows(box: Box, start: int, stop: int) -> Box:
    first, *inner = box.start
    return Box((first + start, *inner), (first + stop, *box.stop[1:]))


@lru_cache(maxsize=4096)
def _map_to_param(tensor_start: tuple[int, ...], param_start: tuple[int, ...], box: Box) -> Box:
    return box.relative_to(tuple(a - b for a, b in zip(tensor_start, param_start, strict=True)))


def _order(tensors: Iterable[str], num_destinations: int, server_size: int) -> Callable[[Move], tuple[int, ...]]:
    """Each server starts at another layer, so that not all wait for one stage."""
    layers = [list(names) for _, names in groupby(tensors, key=layer_of)]
    position = {name: (number, index) for number, names in enumerate(layers) for index, name in enumerate(names)}
    numbered = [number for number, names in enumerate(layers) if layer_of(names[0]) is not None]
    servers = -(-num_destinations // server_size)
    first_layers = [0, *(numbered[len(numbered) * server // servers] if numbered else 0 for server in range(1, servers))]

    def key(move: Move) -> tuple[int, ...]:
        layer, index = position[move.tensor]
        return (
            (layer - first_layers[move.destination // server_size]) % len(layers),
            index,
            move.source,
            move.destination,
            *move.destination_region.box.start,
        )

    return key


def layer_of(tensor: str) -> int | None:
    match = re.search(r"\.layers\.(\d+)\.", tensor)
    return int(match[1]) if match else None


class _SendItem(NamedTuple):
    key: tuple[tuple[int, ...], int]
    receiver: int
    rows: int
    row_size: int


class _Assignment(NamedTuple):
    key: tuple[tuple[int, ...], int]
    owner: int
    start: int
    stop: int


def _assign_senders(
    items: Mapping[tuple[int, ...], Sequence[_SendItem]], loads: MutableMapping[int, int]
) -> Iterator[_Assignment]:
    """Balances ``loads``. Negligible sets, such as norms, go to a rank that sends to the receiver anyway."""
    routes: set[tuple[int, int]] = set()
    amounts = {owners: sum(item.rows * item.row_size for item in group) for owners, group in items.items()}
    for owners, group in sorted(items.items(), key=lambda pair: (len(pair[0]), -amounts[pair[0]], pair[0])):
        order = sorted(owners, key=lambda owner: (loads[owner], owner))
        amount = amounts[owners]
        level = _water_level([loads[owner] for owner in order], amount)
        if amount <= _TOLERANCE * loads[order[-1]]:
            assigned = _assign_whole(order, group, routes)
        else:
            assigned = _assign_in_order(order, [level - loads[owner] for owner in order], group, slack=_TOLERANCE * level)
        # A generator assigns the items, so that it sees the routes that this loop adds before it chooses the next owner.
        for assignment, item in assigned:
            loads[assignment.owner] += (assignment.stop - assignment.start) * item.row_size
            routes.add((assignment.owner, item.receiver))
            yield assignment


def _water_level(loads: Sequence[int], amount: int) -> float:
    """Water-filling: over the lowest ``count`` loads the level is (sum + amount) / count."""
    total = float(amount)
    for count, load in enumerate(loads, 1):
        total += load
        if count == len(loads) or total / count <= loads[count]:
            return total / count
    raise AssertionError("an item has an owner")


def _assign_whole(
    order: Sequence[int], items: Sequence[_SendItem], routes: Set[tuple[int, int]]
) -> Iterator[tuple[_Assignment, _SendItem]]:
    for item in items:
        owner = next((owner for owner in order if (owner, item.receiver) in routes), order[0])
        yield _Assignment(item.key, owner, 0, item.rows), item


def _assign_in_order(
    order: Sequence[int], capacities: Sequence[float], items: Sequence[_SendItem], *, slack: float
) -> Iterator[tuple[_Assignment, _SendItem]]:
    """Units are elements. An item is divided if more than ``slack`` would be too much."""
    index, capacity = 0, capacities[0]
    for item in items:
        start = 0
        while start < item.rows:
            left = item.rows - start
            is_last = index == len(order) - 1
            fits = left * item.row_size <= capacity + slack
            rows = left if is_last or fits else min(left, round(capacity / item.row_size))
            if not is_last and (rows <= 0 or capacity <= slack):
                # The excess (a negative capacity) or rest of this owner carries over to the next one.
                index += 1
                capacity += capacities[index]
                continue
            yield _Assignment(item.key, order[index], start, start + rows), item
            start += rows
            capacity -= rows * item.row_size


def _digest_of(*inputs: object) -> str:
    text = json.dumps([_FORMAT, _VERSION, [_plain(value) for value in inputs]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def plan_to_json(plan: ReshardPlan) -> str:
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    moves = [
        [
            number(move.tensor),
            move.source,
            move.destination,
            number(move.source_param),
            _region_to_list(move.source_region),
            number(move.destination_param),
            _region_to_list(move.destination_region),
        ]
        for move in plan.moves
    ]
    return json.dumps(
        {
            "format": _FORMAT,
            "version": _VERSION,
            "digest": plan.digest,
            "num_sources": plan.num_sources,
            "num_destinations": plan.num_destinations,
            "local": sorted(plan.local.items()),
            "names": list(names),
            "moves": moves,
        },
        separators=(",", ":"),
    )


def _region_to_list(region: Region) -> list[Any]:
    return [list(region.box.start), list(region.box.stop), region.count, region.step]


def prove(plan: ReshardPlan, sources: Sequence[ShardLayout], destinations: Sequence[ShardLayout]) -> None:
    """Every element of every destination must be written once, from its place in the source. Raises RuntimeError."""
    source_shards, destination_shards = _shards_by_param(sources), _shards_by_param(destinations)
    written: dict[tuple[int, str], list[Box]] = defaultdict(list)
    for move in plan.moves:
        for source_box, destination_box in zip(_boxes(move.source_region), _boxes(move.destination_region), strict=True):
            sent = _in_tensor(source_box, move.tensor, source_shards.get((move.source, move.source_param), {}))
            needed = _in_tensor(
                destination_box, move.tensor, destination_shards.get((move.destination, move.destination_param), {})
            )
            if sent is None or sent != needed:
                raise RuntimeError(f"{_name(move)} takes {sent} to where {needed} belongs; make the plan again")
            written[move.destination, move.destination_param].append(destination_box)
    for (rank, param), tensors in destination_shards.items():
        problem = _find_problem(
            tuple(written[rank, param]), tuple(shard.param_box for shards in tensors.values() for shard in shards)
        )
        if problem:
            raise RuntimeError(f"the plan writes {problem} of {param} on destination rank {rank}; make the plan again")


@lru_cache(maxsize=4096)
def _find_problem(written: tuple[Box, ...], needed: tuple[Box, ...]) -> str:
    for i, j in overlapping_pairs(written):
        return f"{written[i]} and {written[j]}, which overlap,"
    # Disjoint boxes within the needed ones cover them if and only if they have as many elements.
    written_numel, needed_numel = _numel(written), _numel(needed)
    return "" if written_numel == needed_numel else f"{written_numel} of {needed_numel} elements"


def _shards_by_param(layouts: Sequence[ShardLayout]) -> dict[tuple[int, str], dict[str, list[Shard]]]:
    shards: dict[tuple[int, str], dict[str, list[Shard]]] = defaultdict(dict)
    for rank, layout in enumerate(layouts):
        for shard in layout.shards:
            shards[rank, shard.param].setdefault(shard.tensor, []).append(shard)
    return shards


def _boxes(region: Region) -> Iterator[Box]:
    (first, *start), (last, *stop) = region.box.start, region.box.stop
    for number in range(region.count):
        shift = number * region.step
        yield Box((first + shift, *start), (last + shift, *stop))


def _in_tensor(box: Box, tensor: str, shards: Mapping[str, Sequence[Shard]]) -> Box | None:
    parts = (_map_to_tensor(box, shard.param_box, shard.box) for shard in shards.get(tensor, ()))
    return next((part for part in parts if part is not None), None)


@lru_cache(maxsize=4096)
def _map_to_tensor(box: Box, param_box: Box, tensor_box: Box) -> Box | None:
    if param_box.intersection(box) != box:
        return None
    return box.relative_to(tuple(a - b for a, b in zip(param_box.start, tensor_box.start, strict=True)))


def _numel(boxes: Sequence[Box]) -> int:
    return sum(math.prod(box.shape) for box in boxes)


def _name(move: Move) -> str:
    return (
        f"the move of {move.tensor} from {move.source_param} of source rank {move.source} "
        f"to {move.destination_param} of destination rank {move.destination}"
    )


Link = Literal["device", "nvlink", "network"]


@dataclass(frozen=True)
class Cluster:
    """Rates are in 10⁹ bytes/s per GPU and direction. Unless ``shared``, workers have nodes of their own."""

    gpus_per_node: int = 8
    nvlink_gb_per_s: float = 450.0
    network_gb_per_s: float = 50.0
    shared: bool = False

    def local(self, num_sources: int, num_destinations: int) -> dict[int, int]:
        return {rank: rank for rank in range(min(num_sources, num_destinations))} if self.shared else {}


@dataclass(frozen=True)
class _LinkTraffic:
    link: Link
    pairs: int
    total: int
    busiest_sender: int
    busiest_receiver: int
    seconds: float


def _traffic(plan: ReshardPlan, itemsize: int, cluster: Cluster) -> list[_LinkTraffic]:
    link_of = _links(plan, cluster)
    bytes_by_link: dict[Link, Counter[tuple[int, int]]] = {"device": Counter(), "nvlink": Counter(), "network": Counter()}
    for (source, destination), size in plan.bytes_between(itemsize).items():
        bytes_by_link[link_of(source, destination)][source, destination] += size
    bytes_by_link["device"].update(plan.bytes_between(itemsize, local=True))
    rates = {"nvlink": cluster.nvlink_gb_per_s, "network": cluster.network_gb_per_s}
    result = []
    for link, pairs in bytes_by_link.items():
        sent, received = Counter[int](), Counter[int]()
        for (source, destination), size in pairs.items():
            sent[source] += size
            received[destination] += size
        if pairs:
            busiest = max(sent.values()), max(received.values())
            seconds = max(busiest) / 1e9 / rates[link] if link in rates else 0.0
            result.append(_LinkTraffic(link, len(pairs), pairs.total(), *busiest, seconds))
    return result


def _links(plan: ReshardPlan, cluster: Cluster) -> Callable[[int, int], Link]:
    nodes_before = 0 if cluster.shared else -(-plan.num_sources // cluster.gpus_per_node)

    def link_of(source: int, destination: int) -> Link:
        source_node, destination_node = source // cluster.gpus_per_node, nodes_before + destination // cluster.gpus_per_node
        return "nvlink" if source_node == destination_node else "network"

    return link_of


@dataclass(frozen=True)
class PlanSummary:
    """Traffic is in bytes; ``imbalance`` is the sources' largest load over the mean."""

    sources: int
    destinations: int
    moves: int
    digest: str
    built_in_seconds: float
    received_by_each: int
    imbalance: float
    links: list[_LinkTraffic]
    seconds: float


def summarize_plan(plan: ReshardPlan, itemsize: int, cluster: Cluster, *, built_in_seconds: float) -> PlanSummary:
    received, sent = Counter[int](), Counter[int]()
    for move in plan.moves:
        received[move.destination] += move.numel * itemsize
        sent[move.source] += 0 if plan.is_local(move) else move.numel * itemsize
    links = _traffic(plan, itemsize, cluster)
    return PlanSummary(
        sources=plan.num_sources,
        destinations=plan.num_destinations,
        moves=len(plan.moves),
        digest=plan.digest,
        built_in_seconds=built_in_seconds,
        received_by_each=max(received.values()),
        imbalance=max(sent.values()) * plan.num_sources / max(sent.total(), 1),
        links=links,
        seconds=max(link.seconds for link in links),
    )
