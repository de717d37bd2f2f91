from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from tepo_megatron.weights.geometry import Box, Move, Region, ReshardPlan, Shard, ShardLayout, overlapping_pairs


def prove(plan: ReshardPlan, sources: Sequence[ShardLayout], destinations: Sequence[ShardLayout]) -> None:
    """Checks that every element of every destination shard is written once, from its place in the source layouts.

    Raises RuntimeError naming tensor, parameter and ranks of the first part that is not.
    """
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
