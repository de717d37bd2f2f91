"""Writes and reads checkpoints that any parallel layout can resume from: boxes of Hugging Face tensors, and a JSON state.

    step_000100/state.json                    step, counters, whatever the caller adds
    step_000100/shards/rank00003-00001.safetensors   "master|model.norm.weight|0" → the box of that tensor that starts there

The ranks write in parallel, each box by one of those that hold it; a reader takes the intersections of what is stored with what
it needs. On a cluster the folder must be on a file system that all ranks share. A folder that was not finished keeps the
suffix ``.partial``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from tepo_megatron.bridge.geometry import Shard, ShardLayout
from tepo_megatron.bridge.storage.files import write_stream
from tepo_megatron.bridge.storage.stored import SHARDS, box_key, open_boxes
from tepo_megatron.engine import optimizer_state
from tepo_megatron.engine.checkpoint_folder import checkpoint_folder, finished


def save(
    folder: Path,
    *,
    step: int,
    state: dict[str, Any],
    optimizer: MegatronOptimizer,
    params: dict[str, torch.nn.Parameter],
    shards: Sequence[Shard],
    keep: int,
) -> Path:
    """Writes ``folder/step_XXXXXX`` and removes all but the newest ``keep``.

    ``shards``: what this rank writes; over all ranks they are the model once. Every rank calls; returns when all have written.
    """
    out = checkpoint_folder(folder, step)
    partial = out.with_name(out.name + ".partial")
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / SHARDS).mkdir(parents=True)
    dist.barrier()
    # Ranks that write nothing still take part in the collectives.
    write_stream(partial / SHARDS, f"rank{rank:05d}", _boxes(optimizer, params, shards))
    dist.barrier()
    if rank == 0:
        # state.json comes last and the rename makes the checkpoint visible: a crash at any point leaves the older ones.
        (partial / "state.json").write_text(json.dumps({"step": step, **state}, indent=2) + "\n")
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
        for old in finished(folder)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return out


def _boxes(
    optimizer: MegatronOptimizer, params: dict[str, torch.nn.Parameter], shards: Sequence[Shard]
) -> Iterator[tuple[str, Tensor]]:
    by_param = _by_param(shards)
    for name, state, tensor in optimizer_state.collect(optimizer, params):
        for shard in by_param.get(name, ()):
            # a copy, so that a box that waits to be written does not keep the whole parameter in memory
            yield box_key(state, shard.tensor, shard.box), tensor[shard.at.slices].clone()


def _by_param(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    by_param: dict[str, list[Shard]] = {}
    for shard in shards:
        by_param.setdefault(shard.param, []).append(shard)
    return by_param


def load(
    folder: Path, *, optimizer: MegatronOptimizer, params: dict[str, torch.nn.Parameter], layout: ShardLayout
) -> dict[str, Any]:
    """Restores weights and optimizer from a checkpoint written under any layout; returns its ``state.json``.

    Every rank calls (no communication; each reads what it needs). Raises ValueError if something is missing or damaged.
    """
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} is not a finished checkpoint: {error}") from None
    stored = {kind: open_boxes(folder, kind) for kind in optimizer_state.STATES}
    by_param = _by_param(layout.shards)
    for name, param in params.items():
        values = {}
        for kind in optimizer_state.STATES:
            full = torch.zeros(param.shape, dtype=torch.float32)
            for shard in by_param[name]:
                stored[kind].read(shard.tensor, shard.box, full[shard.at.slices])
            values[kind] = full.to(param.device)
        optimizer_state.restore(optimizer, param, values, updates=state["updates"])
    return state
