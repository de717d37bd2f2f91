"""Checks and reads checkpoints, which any parallel layout can resume from. ``checkpoint/saving.py`` writes them.

They are boxes of Hugging Face tensors, and a JSON state:

    step_000100/state.json                    step, counters, what the run is, whatever the caller adds
    step_000100/shards/rank00003-00001.safetensors   "master|model.norm.weight|0" → the box of that tensor that starts there
    step_000100/manifest.json                 written last: the length and the digest of every file

The ranks write in parallel, each the optimizer states that it holds; a reader takes the intersections of what is stored with
what it needs. On a cluster the folder must be on a file system that all ranks share. A folder that was not finished keeps the
suffix ``.partial``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tepo_megatron.trainer.checkpoints.folder import read_state
from tepo_megatron.trainer.megatron.checkpoint.local_boxes import owned_parts, shards_by_param
from tepo_megatron.trainer.megatron.optimizer import optimizer_state
from tepo_megatron.trainer.megatron.platform.collectives import all_gather_json, broadcast_json
from tepo_megatron.trainer.megatron.policy.policy import Policy
from tepo_megatron.weights.geometry import ShardLayout
from tepo_megatron.weights.storage.manifest import DamagedCheckpoint, read_manifest
from tepo_megatron.weights.storage.stored import open_boxes

_CPU = torch.device("cpu")


def check(folder: Path, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Reads every byte of a checkpoint, each rank a part of the files, and returns its ``state.json``.

    Every rank calls; all return, or all raise the same DamagedCheckpoint with everything that any of them found. A checkpoint
    of the first format has no digests: of it only the state is checked.
    """
    # Rank 0 alone looks which files are there: a thousand ranks that ask for a thousand files each are a burden to a cluster.
    own = _read_or_problems(lambda: read_state(folder)) if dist.get_rank() == 0 else None
    state, problems = broadcast_json(own, source=0, device=_CPU, group=group)
    if not problems and "format" in state:
        _, found = _read_or_problems(lambda: _check_share(folder))
        everywhere = all_gather_json(found, device=_CPU, group=group)
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
    """This rank's part of the digests. Raises DamagedCheckpoint."""
    manifest = read_manifest(folder)
    if problems := manifest.wrong_contents(manifest.shares(dist.get_world_size())[dist.get_rank()]):
        raise DamagedCheckpoint(folder, problems)
    return {}


def load(folder: Path, *, policy: Policy, layout: ShardLayout, updates: int) -> int:
    """Restores weights and optimizer from a checkpoint written under any layout, which :func:`check` has found whole.

    A rank reads the states that it holds, and no other bytes; weights whose masters are elsewhere come from there. ``updates``:
    how many the optimizer has done. Every rank calls. Returns how many bytes this rank has read. Raises ValueError if a tensor
    of this model is not in it.
    """
    stored = {kind: open_boxes(folder, kind) for kind in optimizer_state.STATES}
    by_param = shards_by_param(layout.shards)
    read = 0
    for name, param in policy.trained.items():
        owned = optimizer_state.owned_range(policy.optimizer, param)
        values = {kind: torch.zeros(owned.stop - owned.start) for kind in optimizer_state.STATES}
        for shard, part in owned_parts(policy.optimizer, param, by_param[name]):
            for kind in optimizer_state.STATES:
                stored[kind].read(shard.tensor, shard.box, into := part.of(values[kind]))
                read += into.nbytes
        on_device = {kind: value.to(param.device) for kind, value in values.items()}
        optimizer_state.restore(policy.optimizer, param, on_device, updates=updates)
    for name, bias in policy.expert_biases.items() if policy.lora is None else ():
        for shard in by_param[name]:
            stored["master"].read(shard.tensor, shard.box, bias)
            read += bias.nbytes
    optimizer_state.spread(policy.optimizer, policy.ddp)
    return read


def check_restored(folder: Path, state: dict[str, Any], digest: str) -> None:
    """Raises RuntimeError unless ``digest`` of the weights that were read is that of the weights that were saved."""
    expected = state.get("weights_digest", digest)
    if digest != expected:
        raise RuntimeError(
            f"{folder}: the weights that were read have the digest {digest}, those that were saved {expected}, although its "
            "files are whole: the memory or the network of a machine is broken, or model.dtype is not the checkpoint's"
        )
