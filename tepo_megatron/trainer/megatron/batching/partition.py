"""Assigns the sequences of a step to micro-batches: as few as hold them, of equal cost, and as many on every rank."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from tepo_megatron.weights.architecture import ModelSpec

_EVEN = 1.05
_MORE = 2
"""So many micro-batches more (or a whole ``multiple``) are tried for a rank, where with the least number their costs are not
even."""

MicroBatch = list[int]
"""Numbers of sequences."""


def attention_length(spec: ModelSpec) -> float:
    """Returns how long a sequence is, in tokens, whose attention costs as much as its matrix products with weights.

    Causal attention over L tokens takes 2 · heads · head_dim · L operations a token and layer, a weight takes 2.
    """
    heads = spec.num_heads * spec.head_dim
    projections = spec.hidden_size * (2 * heads + 2 * spec.num_kv_heads * spec.head_dim)
    width = spec.ffn_size if spec.experts is None else spec.experts.per_token * spec.ffn_size + spec.experts.shared_ffn_size
    mlp = 3 * spec.hidden_size * width
    head = spec.hidden_size * spec.vocab_size / spec.num_layers
    return (projections + mlp + head) / heads


def partition(
    lengths: Sequence[int], *, ranks: int, max_tokens: int, attention_length: float = math.inf, multiple: int = 1
) -> list[list[MicroBatch]]:
    """Assigns sequences to micro-batches of the data-parallel ranks: ``result[rank][micro_batch]`` lists their numbers.

    A sequence of L tokens costs L + L² / ``attention_length``. Micro-batches have about equal costs, and so have the ranks; the
    k-th micro-batches of the ranks are about the k-th most expensive, for ranks that wait for one another in each.

    Every rank gets the same number of micro-batches, as Megatron's schedules need, and a ``multiple`` of them, as interleaved
    stages do; none is empty. A micro-batch holds at most ``max_tokens``, unless a single sequence is longer or there are too
    few sequences to give every rank more of them. Deterministic, so that every rank computes the same. Raises ValueError for
    fewer sequences than ranks × ``multiple``.
    """
    if len(lengths) < ranks * multiple:
        each = f", {multiple} for each, which interleaved pipeline stages (engine.parallel.vpp) need" if multiple > 1 else ""
        raise ValueError(f"{len(lengths)} sequences cannot be spread over {ranks} data-parallel ranks{each}; use more rollouts")
    costs = [length + length * length / attention_length for length in lengths]
    order = sorted(range(len(lengths)), key=lambda at: (-lengths[at], at))
    most = len(lengths) // (ranks * multiple) * multiple
    tight = _fill_tightly(order, lengths, max_tokens)
    least = min(most, -(-len(tight) // (ranks * multiple)) * multiple)
    candidates = []
    for per_rank in range(least, min(most, least + max(_MORE, multiple)) + 1, multiple):
        bins = _fill_evenly(order, lengths, costs, count=ranks * per_rank, max_tokens=max_tokens)
        if all(len(members) == 1 or sum(lengths[at] for at in members) <= max_tokens for members in bins):
            candidates.append(bins)
            if _imbalance(bins, costs) <= _EVEN:
                return _deal(bins, costs, ranks)
    # Where evening out broke the bound, cutting the tight ones keeps to it, if there are sequences to cut them into.
    tight = _cut(tight, ranks * least) if len(tight) <= ranks * least else bins
    return _deal(candidates[0] if candidates else tight, costs, ranks)


def _imbalance(bins: Sequence[MicroBatch], costs: Sequence[float]) -> float:
    """Returns the cost of the most expensive micro-batch, as a multiple of the mean."""
    return max(sum(costs[at] for at in members) for members in bins) * len(bins) / sum(costs)


def _fill_tightly(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[MicroBatch]:
    """Puts each sequence, the longest first, where it leaves the least room, or into a new micro-batch."""
    bins: list[MicroBatch] = []
    rooms: list[tuple[int, int]] = []  # (tokens that still fit, micro-batch), sorted
    for at in order:
        place = bisect_left(rooms, (lengths[at], -1))
        if place == len(rooms):
            bins.append([at])
            insort(rooms, (max_tokens - lengths[at], len(bins) - 1))
        else:
            room, index = rooms.pop(place)
            bins[index].append(at)
            insort(rooms, (room - lengths[at], index))
    return bins


def _fill_evenly(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], *, count: int, max_tokens: int
) -> list[MicroBatch]:
    """Puts each sequence, the longest first, into the cheapest of ``count`` micro-batches that has room; into that with
    the most room if none has enough.
    """
    bins: list[MicroBatch] = [[] for _ in range(count)]
    rooms, loads = [max_tokens] * count, [0.0] * count
    open_ = [(0.0, index) for index in range(count)]  # a heap by cost
    full: list[tuple[int, int]] = []  # a heap by room, the most first: lengths fall, so that what is full may be open again
    for at in order:
        while full and -full[0][0] >= lengths[at]:
            index = heapq.heappop(full)[1]
            heapq.heappush(open_, (loads[index], index))
        while open_ and bins[open_[0][1]] and rooms[open_[0][1]] < lengths[at]:
            index = heapq.heappop(open_)[1]
            heapq.heappush(full, (-rooms[index], index))
        index = heapq.heappop(open_)[1] if open_ else heapq.heappop(full)[1]
        bins[index].append(at)
        rooms[index] -= lengths[at]
        loads[index] += costs[at]
        heapq.heappush(open_, (loads[index], index))
    return bins


def _cut(bins: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    """Cuts the micro-batches of the most sequences in two until there are ``count``."""
    heap = [(-len(members), number, members) for number, members in enumerate(bins)]
    heapq.heapify(heap)
    while len(heap) < count:
        _, number, members = heapq.heappop(heap)
        for half, own in ((members[::2], number), (members[1::2], len(heap) + count)):
            heapq.heappush(heap, (-len(half), own, half))
    return [members for _, _, members in heap]


def _deal(bins: Sequence[MicroBatch], costs: Sequence[float], ranks: int) -> list[list[MicroBatch]]:
    """Deals micro-batches to ranks, the most expensive first: in each round the rank with the least cost gets the first."""
    price = {id(members): sum(costs[at] for at in members) for members in bins}
    ordered = sorted(bins, key=lambda members: (-price[id(members)], min(members)))
    dealt: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for start in range(0, len(ordered), ranks):
        by_load = sorted(range(ranks), key=loads.__getitem__)
        for rank, members in zip(by_load, ordered[start : start + ranks], strict=True):
            dealt[rank].append(sorted(members))
            loads[rank] += price[id(members)]
    return dealt
