"""Writes and reads checkpoints that any parallel layout can resume from: boxes of Hugging Face tensors, and a JSON state.

    step_000100/state.json                    step, counters, what the run is, whatever the caller adds
    step_000100/shards/rank00003-00001.safetensors   "master|model.norm.weight|0" → the box of that tensor that starts there
    step_000100/manifest.json                 written last: the length and the digest of every file

The ranks write in parallel, each the optimizer states that it holds; a reader takes the intersections of what is stored with
what it needs. On a cluster the folder must be on a file system that all ranks share. A folder that was not finished keeps the
suffix ``.partial``.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from tepo_megatron.bridge.geometry import Box, Shard, ShardLayout, boxes_of_range
from tepo_megatron.bridge.layouts import MegatronParallel
from tepo_megatron.bridge.storage.boxes import WrittenBoxes, describe_os_error, write_boxes
from tepo_megatron.bridge.storage.manifest import (
    FORMAT,
    STATE,
    DamagedCheckpoint,
    FileRecord,
    read_manifest,
    sync_folder,
    write_durably,
    write_manifest,
)
from tepo_megatron.bridge.storage.stored import SHARDS, box_key, open_boxes
from tepo_megatron.bridge.transfer.gather import shards_to_write
from tepo_megatron.engine import optimizer_state
from tepo_megatron.engine.checkpoint_folder import checkpoint_folder, checkpoints, read_state, set_aside
from tepo_megatron.engine.collectives import all_gather_json, broadcast_json
from tepo_megatron.engine.policy import Policy

_CPU = torch.device("cpu")


def save(
    folder: Path,
    *,
    step: int,
    state: dict[str, Any],
    policy: Policy,
    shards: Sequence[Shard],
    group: dist.ProcessGroup | None,
) -> Path:
    """Writes ``folder/step_XXXXXX``; a checkpoint of that name is replaced. ``shards`` are :func:`shards_to_save`; ``group``
    has all ranks and works on the host.

    Every rank calls; returns when all have written. If any fails to, all raise the same RuntimeError, which says what failed
    and how much room there is, and the other checkpoints are as before.
    """
    out = checkpoint_folder(folder, step)
    partial = out.with_name(out.name + ".partial")
    is_root = dist.get_rank() == 0
    attempt = _Attempt(out, group)
    attempt.together(lambda: _make_empty(partial) if is_root else None)
    boxes = _boxes(policy.optimizer, policy.trained, shards)
    own = write_boxes(partial, f"rank{dist.get_rank():05d}", boxes, metadata={"step": str(step)})
    files = attempt.all_wrote(own)
    attempt.together(lambda: _finish(partial, out, step, state, files) if is_root else None)
    return out


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


class _Attempt:
    """One save. A rank whose file system fails must not leave the others waiting: after each part of the work they all
    exchange what went wrong, and all raise it.
    """

    def __init__(self, out: Path, group: dist.ProcessGroup | None) -> None:
        self.out = out
        self.group = group
        self.needed = 0
        """Bytes of the whole checkpoint, once they are known."""

    def together(self, work: Callable[[], None]) -> None:
        """Every rank calls with its part of the work."""
        error = None
        try:
            work()
        except OSError as failed:
            error = f"{failed.filename or self.out}: {describe_os_error(failed)}"
        self._end_if_any(all_gather_json(error, device=_CPU, group=self.group))

    def all_wrote(self, own: WrittenBoxes) -> dict[str, FileRecord]:
        """Every rank calls with what it wrote; returns the files of all."""
        given = {name: [record.bytes, record.sha256] for name, record in own.files.items()}
        found = all_gather_json([given, own.bytes, own.error], device=_CPU, group=self.group)
        self.needed = sum(needed for _, needed, _ in found)
        self._end_if_any([error for _, _, error in found])
        return {name: FileRecord(*record) for files, _, _ in found for name, record in files.items()}

    def _end_if_any(self, errors: list[str | None]) -> None:
        failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
        if not failed:
            return
        partial = self.out.with_name(self.out.name + ".partial")
        free = all_gather_json(_free_bytes(self.out.parent), device=_CPU, group=self.group)[0]
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)  # its room is needed; what cannot be removed is no checkpoint either
        older = [path.name for path in checkpoints(self.out.parent) if path != self.out]
        kept = f"the older checkpoints are as they were (the newest is {older[-1]})" if older else "there is no older one"
        needs = f"it needs {self.needed:,} bytes, " if self.needed else ""
        rank, error = failed[0]
        raise RuntimeError(
            f"checkpoint {self.out} could not be written by rank {rank} ({error}); {needs}{free:,} bytes are free; {kept}. "
            f"Make room ('tepo checkpoint prune {self.out.parent}' removes older ones) and go on with --resume"
        )


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _make_empty(partial: Path) -> None:
    if partial.exists():
        shutil.rmtree(partial)
    (partial / SHARDS).mkdir(parents=True)


def _finish(partial: Path, out: Path, step: int, state: dict[str, Any], files: dict[str, FileRecord]) -> None:
    """State, then the manifest, then the name: a crash at any point leaves the other checkpoints, and never half of one."""
    text = json.dumps({"format": FORMAT, "step": step, **state}, indent=2) + "\n"
    record = write_durably(partial / STATE, text)
    write_manifest(partial, step, {**files, STATE: record})
    for synced in (partial / SHARDS, partial):
        sync_folder(synced)
    replaced = set_aside(out, "abandoned") if out.exists() else None
    partial.rename(out)
    sync_folder(out.parent)
    if replaced is not None:
        shutil.rmtree(replaced)


def _boxes(
    optimizer: MegatronOptimizer, params: Mapping[str, torch.nn.Parameter], shards: Sequence[Shard]
) -> Iterator[tuple[str, Tensor]]:
    by_param = _by_param(shards)
    for name, state, values in optimizer_state.collect(optimizer, params):
        for shard, part in _owned_parts(optimizer, params[name], by_param.get(name, ())):
            # a copy, so that a box that waits to be written does not keep the whole parameter in memory
            yield box_key(state, shard.tensor, shard.box), part.of(values).clone()


@dataclass(frozen=True)
class _Part:
    """A box of a parameter within one contiguous piece of its owned range; ``offset`` is where the piece starts there."""

    piece: Box
    offset: int
    box: Box

    def of(self, values: Tensor) -> Tensor:
        """Returns the box's values, a view of those of the owned range."""
        piece = values[self.offset : self.offset + math.prod(self.piece.shape)].view(self.piece.shape)
        return piece[self.box.relative_to(self.piece.start).slices]


def _owned_parts(
    optimizer: MegatronOptimizer, param: torch.nn.Parameter, shards: Iterable[Shard]
) -> Iterator[tuple[Shard, _Part]]:
    """Yields the parts of shards whose states this rank holds, each as a shard of its own."""
    owned = optimizer_state.owned_range(optimizer, param)
    pieces = list(boxes_of_range(tuple(param.shape), owned.start, owned.stop))
    for shard in shards:
        offset = 0
        for piece in pieces:
            common = shard.at.intersection(piece)
            if common is not None:
                within = common.relative_to(shard.at.start)
                start = tuple(a + b for a, b in zip(shard.box.start, within.start, strict=True))
                stop = tuple(a + b for a, b in zip(shard.box.start, within.stop, strict=True))
                yield Shard(shard.tensor, Box(start, stop), shard.param, common), _Part(piece, offset, common)
            offset += math.prod(piece.shape)


def _by_param(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    by_param: dict[str, list[Shard]] = {}
    for shard in shards:
        by_param.setdefault(shard.param, []).append(shard)
    return by_param


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
    by_param = _by_param(layout.shards)
    read = 0
    for name, param in policy.trained.items():
        owned = optimizer_state.owned_range(policy.optimizer, param)
        values = {kind: torch.zeros(owned.stop - owned.start) for kind in optimizer_state.STATES}
        for shard, part in _owned_parts(policy.optimizer, param, by_param[name]):
            for kind in optimizer_state.STATES:
                stored[kind].read(shard.tensor, shard.box, into := part.of(values[kind]))
                read += into.nbytes
        on_device = {kind: value.to(param.device) for kind, value in values.items()}
        optimizer_state.restore(policy.optimizer, param, on_device, updates=updates)
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
