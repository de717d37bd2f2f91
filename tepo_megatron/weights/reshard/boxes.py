"""Geometry of boxes: which source boxes make up a destination box, and which boxes can travel as one region."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby

from tepo_megatron.weights.geometry import Box, Region


@lru_cache(maxsize=4096)
def overlaps(sources: tuple[Box, ...], destinations: tuple[Box, ...]) -> tuple[tuple[int, int, Box], ...]:
    """Returns (source index, destination index, common box) for every source and destination that have elements in common.

    Raises ValueError if two sources overlap, or if they leave a part of a destination uncovered. Without either, every element
    of every destination is in exactly one of the boxes returned. The layers of a model share one cached result.
    """
    for i, j in overlapping_pairs(sources):
        raise ValueError(f"the parts {sources[i]} and {sources[j]} of one tensor overlap without being equal")
    found: list[tuple[int, int, Box]] = []
    for j, destination in enumerate(destinations):
        common = [(i, box) for i, source in enumerate(sources) if (box := source.intersection(destination)) is not None]
        # The sources are disjoint, so that the sizes of the intersections add up to what is covered.
        covered = sum(math.prod(box.shape) for _, box in common)
        if covered != math.prod(destination.shape):
            raise ValueError(
                f"the source ranks together hold {covered} of {math.prod(destination.shape)} elements of {destination}"
            )
        found += [(i, j, box) for i, box in common]
    return tuple(found)


def overlapping_pairs(boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Yields the indices of every two boxes that share an element."""
    # Sweep by first row: once a box starts below the current one, so do all that follow in the order.
    order = sorted(range(len(boxes)), key=lambda i: boxes[i].start)
    for n, i in enumerate(order):
        for j in order[n + 1 :]:
            if boxes[j].start[0] >= boxes[i].stop[0]:
                break
            if boxes[i].intersection(boxes[j]) is not None:
                yield i, j


@lru_cache(maxsize=4096)
def coalesce(pairs: tuple[tuple[Box, Box], ...]) -> tuple[tuple[Region, Region], ...]:
    """Joins (source, destination) pairs of boxes to as few pairs of regions as possible.

    Boxes that adjoin by rows on both sides become one box. Of the remaining ones, equal boxes at equal distances become one
    region: the interleaved groups of a fused QKV parameter are three regions, not three for each group. The layers of a model
    share one cached result.
    """
    merged: list[tuple[Box, Box]] = []
    for source, destination in sorted(pairs, key=lambda pair: pair[1].start):
        if merged and _adjoin(merged[-1][0], source) and _adjoin(merged[-1][1], destination):
            first = merged.pop()
            source, destination = Box(first[0].start, source.stop), Box(first[1].start, destination.stop)
        merged.append((source, destination))
    return tuple(regions for _, same in groupby(merged, key=_outline) for regions in _regions(list(same)))


def _adjoin(above: Box, below: Box) -> bool:
    """Returns whether ``below`` starts at the row at which ``above`` stops, and both have the same columns."""
    return above.stop[0] == below.start[0] and above.start[1:] == below.start[1:] and above.stop[1:] == below.stop[1:]


def _outline(pair: tuple[Box, Box]) -> tuple[object, ...]:
    """Returns what the boxes of one region have in common: everything but the row at which they start."""
    source, destination = pair
    return source.shape[0], source.start[1:], source.stop[1:], destination.start[1:], destination.stop[1:]


def _regions(pairs: Sequence[tuple[Box, Box]]) -> Iterator[tuple[Region, Region]]:
    """Yields regions of as many consecutive pairs as have the same steps on both sides; all pairs have one outline."""
    starts = [(source.start[0], destination.start[0]) for source, destination in pairs]
    first = 0
    while first < len(pairs):
        end, step = first + 1, (0, 0)
        if end < len(pairs):
            step = (starts[end][0] - starts[first][0], starts[end][1] - starts[first][1])
            # Pairs are ordered by destination, so that the source may step back or overlap; then the pair stays alone.
            if min(step) >= pairs[first][0].shape[0]:
                while end < len(pairs) and (starts[end][0] - starts[end - 1][0], starts[end][1] - starts[end - 1][1]) == step:
                    end += 1
        count = end - first
        source, destination = pairs[first]
        yield (
            Region(source, count, step[0] if count > 1 else 0),
            Region(destination, count, step[1] if count > 1 else 0),
        )
        first = end
