"""Checkpoints that any parallel layout can resume from: boxes of Hugging Face tensors in safetensors, and a JSON state.

    step_000100/state.json                    step, counters, whatever the caller adds
    step_000100/shards/rank00003-00001.safetensors   "master|model.norm.weight|0" → the box of that tensor that starts there

Each model-parallel rank writes what it holds, in parallel; a reader takes the intersections of what is stored with what it
needs. On a cluster the folder must be on a file system that all ranks share. A folder that was not finished keeps the
suffix ``.partial``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from tepo_megatron.bridge.files import open_safetensors, write_stream
from tepo_megatron.engine import optimizer_state
from tepo_megatron.engine.checkpoint_folder import checkpoint_folder, finished
from tepo_megatron.types import Box, Shard, ShardLayout


@dataclass(frozen=True)
class StoredBox:
    file: Path
    key: str
    box: Box


def save(
    folder: Path,
    *,
    step: int,
    state: dict[str, Any],
    optimizer: MegatronOptimizer,
    params: dict[str, torch.nn.Parameter],
    layout: ShardLayout,
    owns_weights: bool,
    keep: int,
) -> Path:
    """Writes ``folder/step_XXXXXX`` and removes all but the newest ``keep``. Every rank calls; it returns when all have
    written.
    """
    out = checkpoint_folder(folder, step)
    partial = out.with_name(out.name + ".partial")
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "shards").mkdir(parents=True)
    dist.barrier()
    boxes = _boxes(optimizer, params, layout)
    if owns_weights:
        write_stream(partial / "shards", f"rank{rank:05d}", boxes)
    else:
        for _ in boxes:  # the other replicas take part in the collectives only
            continue
    dist.barrier()
    if rank == 0:
        (partial / "state.json").write_text(json.dumps({"step": step, **state}, indent=2) + "\n")
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
        for old in finished(folder)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return out


def _boxes(
    optimizer: MegatronOptimizer, params: dict[str, torch.nn.Parameter], layout: ShardLayout
) -> Iterator[tuple[str, Tensor]]:
    by_param: dict[str, list[Shard]] = {}
    for shard in layout.shards:
        by_param.setdefault(shard.param, []).append(shard)
    for name, state, tensor in optimizer_state.collect(optimizer, params):
        for shard in by_param[name]:
            start = ",".join(map(str, shard.box.start))
            yield f"{state}|{shard.tensor}|{start}", tensor[shard.at.slices].clone()


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
    stored = _stored_boxes(folder)
    by_param: dict[str, list[Shard]] = {}
    for shard in layout.shards:
        by_param.setdefault(shard.param, []).append(shard)
    for name, param in params.items():
        values = {}
        for kind in optimizer_state.STATES:
            full = torch.zeros(param.shape, dtype=torch.float32)
            for shard in by_param[name]:
                _read(full[shard.at.slices], shard, stored.get((kind, shard.tensor), []), folder)
            values[kind] = full.to(param.device)
        optimizer_state.restore(optimizer, param, values, updates=state["updates"])
    return state


def _stored_boxes(folder: Path) -> dict[tuple[str, str], list[StoredBox]]:
    stored: dict[tuple[str, str], list[StoredBox]] = {}
    for path in sorted((folder / "shards").glob("*.safetensors")):
        with open_safetensors(path) as handle:
            for key in handle.keys():  # noqa: SIM118 (safe_open has keys() but is no mapping)
                kind, tensor, at = key.split("|")
                start = tuple(int(part) for part in at.split(","))
                shape = handle.get_slice(key).get_shape()
                stop = tuple(a + extent for a, extent in zip(start, shape, strict=True))
                stored.setdefault((kind, tensor), []).append(StoredBox(path, key, Box(start, stop)))
    return stored


def _read(into: Tensor, shard: Shard, stored: list[StoredBox], folder: Path) -> None:
    """Fills ``into``, the place of ``shard``, from the stored boxes that meet it."""
    filled = 0
    for candidate in stored:
        common = shard.box.intersection(candidate.box)
        if common is None:
            continue
        with open_safetensors(candidate.file) as handle:
            part = handle.get_slice(candidate.key)[common.relative_to(candidate.box.start).slices]
        into[common.relative_to(shard.box.start).slices] = part
        filled += part.numel()
    if filled < into.numel():
        raise ValueError(f"checkpoint {folder} holds {filled} of {into.numel()} elements that are needed of {shard.tensor}")
