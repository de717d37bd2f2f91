"""Reads checkpoints under any parallel layout; ``checkpoint/saving.py`` writes them.

The key ``master|model.norm.weight|0`` has the tensor's box that starts at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from tepo_megatron.trainer.checkpoints.folder import read_state
from tepo_megatron.trainer.megatron.platform.collectives import all_gather_json, broadcast_json
from tepo_megatron.trainer.megatron.policy import optimizer_states
from tepo_megatron.trainer.megatron.policy.policy import Policy
from tepo_megatron.weights.geometry import Box, Shard, ShardLayout, boxes_of_range
from tepo_megatron.weights.layouts import MegatronParallel
from tepo_megatron.weights.storage.manifest import DamagedCheckpoint, read_manifest
from tepo_megatron.weights.storage.stored import box_key, open_boxes
from tepo_megatron.weights.transfer.full_tensors import shards_to_write

_CPU = torch.device("cpu")


def check(folder: Path, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Reads every byte, each rank a part of the files; returns ``state.json``.

    Every rank calls; all return, or all raise the same DamagedCheckpoint. Format 1 has no digests: only the state is checked.
    """
    # Rank 0 alone lists the files: a thousand ranks asking for a thousand files each would overload a file system.
    result = _read_or_problems(lambda: read_state(folder)) if dist.get_rank() == 0 else None
    state, problems = broadcast_json(result, source=0, device=_CPU, group=group)
    if not problems and "format" in state:
        _, local_problems = _read_or_problems(lambda: _check_share(folder))
        everywhere = all_gather_json(local_problems, device=_CPU, group=group)
        problems = list(dict.fromkeys(problem for rank in everywhere for problem in rank))
    if problems:
        raise DamagedCheckpoint(folder, problems)
    return state


def _read_or_problems(read: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    try:
        return read(), []
    except DamagedCheckpoint as error:
        return {}, list(error.problems)


def _check_share(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    if problems := manifest.wrong_contents(manifest.shares(dist.get_world_size())[dist.get_rank()]):
        raise DamagedCheckpoint(folder, problems)
    return {}


def load(folder: Path, *, policy: Policy, layout: ShardLayout, updates: int) -> int:
    """Restores a whole checkpoint of any layout; returns the bytes that this rank read. Every rank calls.

    ``updates``: optimizer steps made. Raises ValueError if a tensor of this model is missing.
    """
    stored = {kind: open_boxes(folder, kind) for kind in optimizer_states.STATES}
    by_param = _shards_by_param(layout.shards)
    read = 0
    for name, param in policy.trained.items():
        local = optimizer_states.local_range(policy.optimizer, param)
        values = {kind: torch.zeros(local.stop - local.start) for kind in optimizer_states.STATES}
        for shard, part in _local_parts(policy.optimizer, param, by_param[name]):
            for kind in optimizer_states.STATES:
                stored[kind].read(shard.tensor, shard.box, into := part.of(values[kind]))
                read += into.nbytes
        on_device = {kind: value.to(param.device) for kind, value in values.items()}
        optimizer_states.restore(policy.optimizer, param, on_device, updates=updates)
    for name, bias in policy.expert_biases.items() if policy.lora is None else ():
        for shard in by_param[name]:
            stored["master"].read(shard.tensor, shard.box, bias)
            read += bias.nbytes
    optimizer_states.spread(policy.optimizer, policy.ddp)
    return read


def check_restored(folder: Path, state: dict[str, Any], digest: str) -> None:
    """Raises RuntimeError unless ``digest`` is the saved weights' digest."""
    expected = state.get("weights_digest", digest)
    if digest != expected:
        raise RuntimeError(
            f"{folder}: the weights that were read have the digest {digest}, those that were saved {expected}, although its "
            "files are whole: the memory or the network of a machine is broken, or model.dtype is not the checkpoint's"
        )


def shards_to_save(
    sources: Mapping[str, list[tuple[int, Shard]]], split: MegatronParallel, rank: int, policy: Policy
) -> list[Shard]:
    """Returns the shards that this rank writes; over all ranks they are the model once."""
    if not optimizer_states.is_distributed(policy.optimizer):
        return shards_to_write(sources, rank)
    place = split.coordinates(rank)
    shards = []
    for owner, shard in (pair for pairs in sources.values() for pair in pairs):
        other, param = split.coordinates(owner), policy.trained.get(shard.param)
        if param is None or other.pp_rank != place.pp_rank:
            continue
        expert = optimizer_states.is_parallel_expert(param)
        same = (other.etp_rank, other.ep_rank) == (place.etp_rank, place.ep_rank) if expert else other.tp_rank == place.tp_rank
        if same:
            shards.append(shard)
    return shards


def bias_boxes(sources: Mapping[str, list[tuple[int, Shard]]], rank: int, policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Yields (key, fp32 copy), as masters; nothing if adapters are trained."""
    if policy.lora is not None:
        return
    for shard in shards_to_write(sources, rank):
        if shard.param in policy.expert_biases:
            yield box_key("master", shard.tensor, shard.box), policy.expert_biases[shard.param].clone()


def state_boxes(
    optimizer: MegatronOptimizer, params: Mapping[str, torch.nn.Parameter], shards: Sequence[Shard]
) -> Iterator[tuple[str, Tensor]]:
    """Yields (key, fp32 copy)."""
    by_param = _shards_by_param(shards)
    for name, state, values in optimizer_states.collect(optimizer, params):
        for shard, part in _local_parts(optimizer, params[name], by_param.get(name, ())):
            yield box_key(state, shard.tensor, shard.box), part.of(values).clone()


@dataclass(frozen=True)
class _LocalPart:
    """``offset``: start of ``piece`` in the local range."""

    piece: Box
    offset: int
    box: Box

    def of(self, values: Tensor) -> Tensor:
        piece = values[self.offset : self.offset + math.prod(self.piece.shape)].view(self.piece.shape)
        return piece[self.box.relative_to(self.piece.start).slices]


def _local_parts(
    optimizer: MegatronOptimizer, param: torch.nn.Parameter, shards: Iterable[Shard]
) -> Iterator[tuple[Shard, _LocalPart]]:
    local = optimizer_states.local_range(optimizer, param)
    pieces = list(boxes_of_range(tuple(param.shape), local.start, local.stop))
    for shard in shards:
        offset = 0
        for piece in pieces:
            common = shard.param_box.intersection(piece)
            if common is not None:
                within = common.relative_to(shard.param_box.start)
                start = tuple(a + b for a, b in zip(shard.box.start, within.start, strict=True))
                stop = tuple(a + b for a, b in zip(shard.box.start, within.stop, strict=True))
                yield Shard(shard.tensor, Box(start, stop), shard.param, common), _LocalPart(piece, offset, common)
            offset += math.prod(piece.shape)


def _shards_by_param(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    by_param: dict[str, list[Shard]] = {}
    for shard in shards:
        by_param.setdefault(shard.param, []).append(shard)
    return by_param
