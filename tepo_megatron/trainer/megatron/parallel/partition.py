"""Assigns sequences to micro-batches: as few as possible, of equal cost, equally many per rank."""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from tepo_megatron.weights.architecture import ModelSpec

_EVEN = 1.05
_MORE = 2

_MicroBatch = list[int]


def attention_length(spec: ModelSpec) -> float:
    """Returns the length at which a sequence's attention costs as much as its products with weights.

    Causal attention over L tokens takes 2 · heads · head_dim · L operations per token and layer.
    """
    heads = spec.num_heads * spec.head_dim
    projections = spec.hidden_size * (2 * heads + 2 * spec.num_kv_heads * spec.head_dim)
    width = spec.ffn_size if spec.experts is None else spec.experts.per_token * spec.ffn_size + spec.experts.shared_ffn_size
    mlp = 3 * spec.hidden_size * width
    head = spec.hidden_size * spec.vocab_size / spec.num_layers
    return (projections + mlp + head) / heads


def partition(
    lengths: Sequence[int], *, ranks: int, max_tokens: int, attention_length: float = math.inf, multiple: int = 1
) -> list[list[_MicroBatch]]:
    """Returns indices as ``result[data-parallel rank][micro_batch]``. Raises ValueError for too few sequences.

    A sequence of L tokens costs L + L² / ``attention_length``. All ranks' k-th micro-batches cost about the same, as ranks wait
    for each other. Only a single sequence, or too few sequences, exceed ``max_tokens``.
    """
    if len(lengths) < ranks * multiple:
        why = f", {multiple} for each, which interleaved pipeline stages (engine.parallel.vpp) need" if multiple > 1 else ""
        raise ValueError(f"{len(lengths)} sequences cannot be spread over {ranks} data-parallel ranks{why}; use more rollouts")
    costs = [length + length * length / attention_length for length in lengths]
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    most = len(lengths) // (ranks * multiple) * multiple
    tight = _fill_tightly(order, lengths, max_tokens)
    least = min(most, -(-len(tight) // (ranks * multiple)) * multiple)
    candidates = []
    for per_rank in range(least, min(most, least + max(_MORE, multiple)) + 1, multiple):
        bins = _fill_evenly(order, lengths, costs, count=ranks * per_rank, max_tokens=max_tokens)
        if all(len(members) == 1 or sum(lengths[index] for index in members) <= max_tokens for members in bins):
            candidates.append(bins)
            if max(sum(costs[index] for index in members) for members in bins) * len(bins) / sum(costs) <= _EVEN:
                return _deal(bins, costs, ranks)
    # If evening out exceeded the bound, cutting the tight ones keeps it, if there are enough sequences.
    tight = _cut(tight, ranks * least) if len(tight) <= ranks * least else bins
    return _deal(candidates[0] if candidates else tight, costs, ranks)


def _fill_tightly(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[_MicroBatch]:
    bins: list[_MicroBatch] = []
    rooms: list[tuple[int, int]] = []  # (tokens that still fit, micro-batch), sorted
    for sequence in order:
        place = bisect_left(rooms, (lengths[sequence], -1))
        if place == len(rooms):
            bins.append([sequence])
            insort(rooms, (max_tokens - lengths[sequence], len(bins) - 1))
        else:
            room, index = rooms.pop(place)
            bins[index].append(sequence)
            insort(rooms, (room - lengths[sequence], index))
    return bins


def _fill_evenly(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], *, count: int, max_tokens: int
) -> list[_MicroBatch]:
    bins: list[_MicroBatch] = [[] for _ in range(count)]
    rooms, loads = [max_tokens] * count, [0.0] * count
    open_ = [(0.0, index) for index in range(count)]  # a heap by cost
    full: list[tuple[int, int]] = []  # a heap by room, the most first: lengths fall, so full ones may fit later sequences
    for sequence in order:
        while full and -full[0][0] >= lengths[sequence]:
            index = heapq.heappop(full)[1]
            heapq.heappush(open_, (loads[index], index))
        while open_ and bins[open_[0][1]] and rooms[open_[0][1]] < lengths[sequence]:
            index = heapq.heappop(open_)[1]
            heapq.heappush(full, (-rooms[index], index))
        index = heapq.heappop(open_)[1] if open_ else heapq.heappop(full)[1]
        bins[index].append(sequence)
        rooms[index] -= lengths[sequence]
        loads[index] += costs[sequence]
        heapq.heappush(open_, (loads[index], index))
    return bins


def _cut(bins: Sequence[_MicroBatch], count: int) -> list[_MicroBatch]:
    heap = [(-len(members), number, members) for number, members in enumerate(bins)]
    heapq.heapify(heap)
    while len(heap) < count:
        _, number, members = heapq.heappop(heap)
        for half, tie_break in ((members[::2], number), (members[1::2], len(heap) + count)):
            heapq.heappush(heap, (-len(half), tie_break, half))
    return [members for _, _, members in heap]


def _deal(bins: Sequence[_MicroBatch], costs: Sequence[float], ranks: int) -> list[list[_MicroBatch]]:
    price = {id(members): sum(costs[index] for index in members) for members in bins}
    ordered = sorted(bins, key=lambda members: (-price[id(members)], min(members)))
    dealt: list[list[_MicroBatch]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for start in range(0, len(ordered), ranks):
        by_load = sorted(range(ranks), key=loads.__getitem__)
        for rank, members in zip(by_load, ordered[start : start + ranks], strict=True):
            dealt[rank].append(sorted(members))
            loads[rank] += price[id(members)]
    return dealt
