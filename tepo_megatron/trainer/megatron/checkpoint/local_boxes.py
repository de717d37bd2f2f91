"""Which boxes of Hugging Face tensors a rank's own optimizer states are: what it writes to a checkpoint, and reads of one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from tepo_megatron.trainer.megatron.optimizer import optimizer_state
from tepo_megatron.trainer.megatron.policy.policy import Policy
from tepo_megatron.weights.geometry import Box, Shard, boxes_of_range
from tepo_megatron.weights.layouts import MegatronParallel
from tepo_megatron.weights.storage.stored import box_key
from tepo_megatron.weights.transfer.full_tensors import shards_to_write


def shards_to_save(
    sources: Mapping[str, list[tuple[int, Shard]]], split: MegatronParallel, rank: int, policy: Policy
) -> list[Shard]:
    """Returns the shards of which a rank writes what it holds of their states. ``sources``: by ``gather_sources``.

    With the distributed optimizer that is a range on each data-parallel rank of the one that ``sources`` names; otherwise all
    of them hold everything, and the named one writes it. Over all ranks it is the model once.
    """
    if not optimizer_state.is_distributed(policy.optimizer):
        return shards_to_write(sources, rank)
    at = split.coordinates(rank)
    found = []
    for owner, shard in (pair for pairs in sources.values() for pair in pairs):
        other, param = split.coordinates(owner), policy.trained.get(shard.param)
        if param is None or other.pp_rank != at.pp_rank:
            continue
        expert = optimizer_state.is_parallel_expert(param)
        same = (other.etp_rank, other.ep_rank) == (at.etp_rank, at.ep_rank) if expert else other.tp_rank == at.tp_rank
        if same:
            found.append(shard)
    return found


def bias_boxes(sources: Mapping[str, list[tuple[int, Shard]]], rank: int, policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Yields (key, fp32 box) of the experts' biases that a rank writes, each a copy: with the masters, and without moments.

    None where adapters are trained, which leave them as the model has them.
    """
    if policy.lora is not None:
        return
    for shard in shards_to_write(sources, rank):
        if shard.param in policy.expert_biases:
            yield box_key("master", shard.tensor, shard.box), policy.expert_biases[shard.param].clone()


def state_boxes(
    optimizer: MegatronOptimizer, params: Mapping[str, torch.nn.Parameter], shards: Sequence[Shard]
) -> Iterator[tuple[str, Tensor]]:
    """Yields (key, fp32 box) of this rank's states within ``shards``, each a copy.

    A box is copied, so that one that waits to be written does not keep a whole parameter, and does not change with it.
    """
    by_param = shards_by_param(shards)
    for name, state, values in optimizer_state.collect(optimizer, params):
        for shard, part in owned_parts(optimizer, params[name], by_param.get(name, ())):
            yield box_key(state, shard.tensor, shard.box), part.of(values).clone()


@dataclass(frozen=True)
class OwnedPart:
    """A box of a parameter within one contiguous piece of its owned range; ``offset`` is where the piece starts there."""

    piece: Box
    offset: int
    box: Box

    def of(self, values: Tensor) -> Tensor:
        """Returns the box's values, a view of those of the owned range."""
        piece = values[self.offset : self.offset + math.prod(self.piece.shape)].view(self.piece.shape)
        return piece[self.box.relative_to(self.piece.start).slices]


def owned_parts(
    optimizer: MegatronOptimizer, param: torch.nn.Parameter, shards: Iterable[Shard]
) -> Iterator[tuple[Shard, OwnedPart]]:
    """Yields the parts of shards whose states this rank holds, each as a shard of its own."""
    owned = optimizer_state.owned_range(optimizer, param)
    pieces = list(boxes_of_range(tuple(param.shape), owned.start, owned.stop))
    for shard in shards:
        offset = 0
        for piece in pieces:
            common = shard.param_box.intersection(piece)
            if common is not None:
                within = common.relative_to(shard.param_box.start)
                start = tuple(a + b for a, b in zip(shard.box.start, within.start, strict=True))
                stop = tuple(a + b for a, b in zip(shard.box.start, within.stop, strict=True))
                yield Shard(shard.tensor, Box(start, stop), shard.param, common), OwnedPart(piece, offset, common)
            offset += math.prod(piece.shape)


def shards_by_param(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    by_param: dict[str, list[Shard]] = {}
    for shard in shards:
        by_param.setdefault(shard.param, []).append(shard)
    return by_param
