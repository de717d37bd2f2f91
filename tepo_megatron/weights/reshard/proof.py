"""Proves a plan: every element of every destination shard is written once, from where the source layouts have it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from tepo_megatron.weights.geometry import Box, Move, Region, ReshardPlan, Shard, ShardLayout, overlapping_pairs


def prove(plan: ReshardPlan, sources: Sequence[ShardLayout], destinations: Sequence[ShardLayout]) -> None:
    """Checks a plan, however it was made or read, against the layouts of both sides. Any process can call it.

    Raises RuntimeError that names the tensor, parameter and ranks of the first part that would be written twice, never, at a
    wrong position, or from a position that holds something else.
    """
    ours, theirs = _shards_by_param(sources), _shards_by_param(destinations)
    written: dict[tuple[int, str], list[Box]] = defaultdict(list)
    for move in plan.moves:
        for source_box, destination_box in zip(_boxes(move.source_region), _boxes(move.destination_region), strict=True):
            sent = _in_tensor(source_box, move.tensor, ours.get((move.source, move.source_param), {}))
            wanted = _in_tensor(destination_box, move.tensor, theirs.get((move.destination, move.destination_param), {}))
            if sent is None or sent != wanted:
                raise RuntimeError(f"{_name(move)} takes {sent} to where {wanted} belongs; make the plan again")
            written[move.destination, move.destination_param].append(destination_box)
    for (rank, param), tensors in theirs.items():
        problem = _find_problem(tuple(written[rank, param]), tuple(shard.at for shards in tensors.values() for shard in shards))
        if problem:
            raise RuntimeError(f"the plan writes {problem} of {param} on destination rank {rank}; make the plan again")


@lru_cache(maxsize=4096)
def _find_problem(written: tuple[Box, ...], wanted: tuple[Box, ...]) -> str:
    """Says why boxes that lie within the wanted ones do not cover them once; empty if they do. Layers share cached results."""
    for i, j in overlapping_pairs(written):
        return f"{written[i]} and {written[j]}, which overlap,"
    # Boxes that lie within the wanted ones and do not overlap cover them if and only if they have as many elements.
    found, whole = _numel(written), _numel(wanted)
    return "" if found == whole else f"{found} of {whole} elements"


def _shards_by_param(layouts: Sequence[ShardLayout]) -> dict[tuple[int, str], dict[str, list[Shard]]]:
    """Returns (rank, parameter) → tensor → its shards in that parameter."""
    held: dict[tuple[int, str], dict[str, list[Shard]]] = defaultdict(dict)
    for rank, layout in enumerate(layouts):
        for shard in layout.shards:
            held[rank, shard.param].setdefault(shard.tensor, []).append(shard)
    return held


def _boxes(region: Region) -> Iterator[Box]:
    """Yields the single boxes of a region."""
    (first, *start), (last, *stop) = region.box.start, region.box.stop
    for number in range(region.count):
        shift = number * region.step
        yield Box((first + shift, *start), (last + shift, *stop))


def _in_tensor(box: Box, tensor: str, held: Mapping[str, Sequence[Shard]]) -> Box | None:
    """Maps a box of a parameter to the tensor, by the one shard in ``held`` that contains it; None if there is none."""
    found = (_map_to_tensor(box, shard.at, shard.box) for shard in held.get(tensor, ()))
    return next((part for part in found if part is not None), None)


@lru_cache(maxsize=4096)
def _map_to_tensor(box: Box, at: Box, tensor_box: Box) -> Box | None:
    """Maps a box of a parameter to the tensor of which ``tensor_box`` lies at ``at``; None if it is not all within ``at``."""
    if at.intersection(box) != box:
        return None
    return box.relative_to(tuple(a - b for a, b in zip(at.start, tensor_box.start, strict=True)))


def _numel(boxes: Sequence[Box]) -> int:
    return sum(math.prod(box.shape) for box in boxes)


def _name(move: Move) -> str:
    return (
        f"the move of {move.tensor} from {move.source_param} of source rank {move.source} "
        f"to {move.destination_param} of destination rank {move.destination}"
    )
