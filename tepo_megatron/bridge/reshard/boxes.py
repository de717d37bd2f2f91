"""Geometry of boxes: which source boxes make up a destination box, and how many boxes can travel as one region."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby

from tepo_megatron.bridge.geometry import Box, Region


@lru_cache(maxsize=4096)
def overlaps(sources: tuple[Box, ...], destinations: tuple[Box, ...]) -> tuple[tuple[int, int, Box], ...]:
    """(source, destination, what both cover) for every pair that meets; the layers of a model share one answer.

    Raises ValueError if two sources overlap, or if they leave a part of a destination uncovered: with neither, every element of
    every destination is in exactly one of the answer's boxes.
    """
    for i, j in meeting_pairs(sources):
        raise ValueError(f"the parts {sources[i]} and {sources[j]} of one tensor overlap without being equal")
    found: list[tuple[int, int, Box]] = []
    for at, destination in enumerate(destinations):
        parts = [(i, part) for i, source in enumerate(sources) if (part := source.intersection(destination)) is not None]
        covered = sum(math.prod(part.shape) for _, part in parts)
        if covered != math.prod(destination.shape):
            raise ValueError(
                f"the source ranks together hold {covered} of {math.prod(destination.shape)} elements of {destination}"
            )
        found += [(i, at, part) for i, part in parts]
    return tuple(found)


def meeting_pairs(boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Indices of every two boxes that share an element. Boxes without rows in common cost nothing."""
    order = sorted(range(len(boxes)), key=lambda i: boxes[i].start)
    for n, i in enumerate(order):
        for j in order[n + 1 :]:
            if boxes[j].start[0] >= boxes[i].stop[0]:
                break
            if boxes[i].intersection(boxes[j]) is not None:
                yield i, j


@lru_cache(maxsize=4096)
def coalesce(pairs: tuple[tuple[Box, Box], ...]) -> tuple[tuple[Region, Region], ...]:
    """The same (source, destination) pairs of boxes as few pairs of regions; again the layers of a model share one answer.

    Boxes that adjoin by rows on both sides become one; of those that remain, equal boxes at equal distances become one region:
    the interleaved groups of a fused QKV parameter are three regions, not three per group.
    """
    merged: list[tuple[Box, Box]] = []
    for source, destination in sorted(pairs, key=lambda pair: pair[1].start):
        if merged and _adjoin(merged[-1][0], source) and _adjoin(merged[-1][1], destination):
            first = merged.pop()
            source, destination = Box(first[0].start, source.stop), Box(first[1].start, destination.stop)
        merged.append((source, destination))
    return tuple(regions for _, same in groupby(merged, key=_outline) for regions in _progressions(list(same)))


def _adjoin(above: Box, below: Box) -> bool:
    return above.stop[0] == below.start[0] and above.start[1:] == below.start[1:] and above.stop[1:] == below.stop[1:]


def _outline(pair: tuple[Box, Box]) -> tuple[object, ...]:
    """What boxes of one region have in common: all but the row at which they start."""
    source, destination = pair
    return source.shape[0], source.start[1:], source.stop[1:], destination.start[1:], destination.stop[1:]


def _progressions(pairs: Sequence[tuple[Box, Box]]) -> Iterator[tuple[Region, Region]]:
    starts = [(source.start[0], destination.start[0]) for source, destination in pairs]
    at = 0
    while at < len(pairs):
        end, step = at + 1, (0, 0)
        if end < len(pairs):
            step = (starts[end][0] - starts[at][0], starts[end][1] - starts[at][1])
            if min(step) >= pairs[at][0].shape[0]:
                while end < len(pairs) and (starts[end][0] - starts[end - 1][0], starts[end][1] - starts[end - 1][1]) == step:
                    end += 1
        count = end - at
        source, destination = pairs[at]
        yield (
            Region(source, count, step[0] if count > 1 else 0),
            Region(destination, count, step[1] if count > 1 else 0),
        )
        at = end
