"""Writes checkpoints, also in the background, and reads them under any parallel layout.

The key ``master|model.norm.weight|0`` has the tensor's box that starts at 0.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.runtime.files import partial_path, sync_folder
from tepo_megatron.runtime.heartbeat import Heartbeat
from tepo_megatron.trainer.checkpoint_folder import checkpoint_folder, checkpoints, read_state, set_aside
from tepo_megatron.trainer.megatron import optimizer_states
from tepo_megatron.trainer.megatron.collectives import all_gather_json, broadcast_json
from tepo_megatron.trainer.megatron.policy import Policy
from tepo_megatron.trainer.megatron.weights import PolicyWeights
from tepo_megatron.trainer.protocol import SavedCheckpoint
from tepo_megatron.weights.geometry import Box, Shard, ShardLayout
from tepo_megatron.weights.layouts import MegatronParallel
from tepo_megatron.weights.storage.manifest import FORMAT, STATE, CheckpointManifest, DamagedCheckpoint, FileRecord
from tepo_megatron.weights.storage.stored import SHARDS, StoredWeights, WrittenBoxes, box_key, describe_os_error, write_boxes
from tepo_megatron.weights.transfer.full_tensors import GatherPlan

_CPU = torch.device("cpu")


def _check(folder: Path, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Each rank reads a part of the files. All ranks call, and all raise the same DamagedCheckpoint."""
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
    manifest = CheckpointManifest.read(folder)
    local_files = manifest.shares(dist.get_world_size())[dist.get_rank()]
    if problems := list(filter(None, map(manifest.wrong_content, local_files))):
        raise DamagedCheckpoint(folder, problems)
    return {}


def _load(folder: Path, *, policy: Policy, layout: ShardLayout, updates: int) -> int:
    """Returns the bytes that this rank read. Every rank calls. Raises ValueError if a tensor is missing."""
    stored = {kind: StoredWeights.open_boxes(folder, kind) for kind in optimizer_states.STATES}
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


def _check_restored(folder: Path, state: dict[str, Any], digest: str) -> None:
    expected = state.get("weights_digest", digest)
    if digest != expected:
        raise RuntimeError(
            f"{folder}: the weights that were read have the digest {digest}, those that were saved {expected}, although its "
            "files are whole: the memory or the network of a machine is broken, or model.dtype is not the checkpoint's"
        )


def _shards_to_save(sources: GatherPlan, split: MegatronParallel, rank: int, policy: Policy) -> list[Shard]:
    if not optimizer_states.is_distributed(policy.optimizer):
        return sources.shards_of(rank)
    place = split.coordinates(rank)
    shards = []
    for owner, shard in (pair for pairs in sources.owners.values() for pair in pairs):
        other, param = split.coordinates(owner), policy.trained.get(shard.param)
        if param is None or other.pp_rank != place.pp_rank:
            continue
        expert = optimizer_states.is_parallel_expert(param)
        same = (other.etp_rank, other.ep_rank) == (place.etp_rank, place.ep_rank) if expert else other.tp_rank == place.tp_rank
        if same:
            shards.append(shard)
    return shards


def _bias_boxes(sources: GatherPlan, rank: int, policy: Policy) -> Iterator[tuple[str, Tensor]]:
    if policy.lora is not None:
        return
    for shard in sources.shards_of(rank):
        if shard.param in policy.expert_biases:
            yield box_key("master", shard.tensor, shard.box), policy.expert_biases[shard.param].clone()


def _state_boxes(
    optimizer: MegatronOptimizer, params: Mapping[str, torch.nn.Parameter], shards: Sequence[Shard]
) -> Iterator[tuple[str, Tensor]]:
    by_param = _shards_by_param(shards)
    for name, state, values in optimizer_states.collect(optimizer, params):
        for shard, part in _local_parts(optimizer, params[name], by_param.get(name, ())):
            yield box_key(state, shard.tensor, shard.box), part.of(values).clone()


@dataclass(frozen=True)
class _LocalPart:
    piece: Box
    offset: int
    box: Box

    def of(self, values: Tensor) -> Tensor:
        piece = values[self.offset : self.offset + self.piece.numel].view(self.piece.shape)
        return piece[self.box.relative_to(self.piece.start).slices]


def _local_parts(
    optimizer: MegatronOptimizer, param: torch.nn.Parameter, shards: Iterable[Shard]
) -> Iterator[tuple[Shard, _LocalPart]]:
    local = optimizer_states.local_range(optimizer, param)
    pieces = list(Box.of_range(tuple(param.shape), local.start, local.stop))
    for shard in shards:
        offset = 0
        for piece in pieces:
            common = shard.param_box.intersection(piece)
            if common is not None:
                within = common.relative_to(shard.param_box.start)
                start = tuple(a + b for a, b in zip(shard.box.start, within.start, strict=True))
                stop = tuple(a + b for a, b in zip(shard.box.start, within.stop, strict=True))
                yield Shard(shard.tensor, Box(start, stop), shard.param, common), _LocalPart(piece, offset, common)
            offset += piece.numel


def _shards_by_param(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    by_param: dict[str, list[Shard]] = {}
    for shard in shards:
        by_param.setdefault(shard.param, []).append(shard)
    return by_param


class _Saving:
    """Every rank calls the methods in the same order; all raise the same RuntimeError if any rank cannot write.

    ``group`` works on the host. ``background`` copies this rank's states to the host (12 bytes per parameter).
    """

    def __init__(
        self,
        folder: Path,
        *,
        step: int,
        state: dict[str, Any],
        policy: Policy,
        shards: Sequence[Shard],
        biases: Iterable[tuple[str, Tensor]],
        group: dist.ProcessGroup | None,
        background: bool,
    ) -> None:
        began = time.monotonic()
        self.step = step
        self._out, self._state, self._group = checkpoint_folder(folder, step), state, group
        self._partial = partial_path(self._out)
        self._attempt = _Attempt(self._out, group)
        self._attempt.together(lambda: _make_empty(self._partial) if dist.get_rank() == 0 else None)
        self._boxes = chain(_state_boxes(policy.optimizer, policy.trained, shards), biases)
        self._write_s = 0.0
        self._written: WrittenBoxes | None = None
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if background:
            self._boxes = chain([(key, box.cpu()) for key, box in self._boxes])
            self._thread = threading.Thread(target=self._write, name=f"write-checkpoint-{step}", daemon=True)
            self._thread.start()
        self._stage_s = time.monotonic() - began

    def is_written(self) -> bool:
        done = self._thread is None or not self._thread.is_alive()
        return all(all_gather_json(done, device=_CPU, group=self._group))

    def finish(self) -> SavedCheckpoint:
        """Every rank calls."""
        began = time.monotonic()
        if self._thread is None:
            self._write()
        else:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._written is not None
        files = self._attempt.all_wrote(self._written)
        self._attempt.together(lambda: self._name(files) if dist.get_rank() == 0 else None)
        seconds = [self._stage_s, self._write_s, self._stage_s + time.monotonic() - began]
        slowest = map(max, zip(*all_gather_json(seconds, device=_CPU, group=self._group), strict=True))
        return SavedCheckpoint(self._out, self.step, *slowest)

    def _write(self) -> None:
        began = time.monotonic()
        try:
            stem = f"rank{dist.get_rank():05d}"
            self._written = write_boxes(self._partial, stem, self._boxes, metadata={"step": str(self.step)})
        except BaseException as error:
            self._failure = error
        self._write_s = time.monotonic() - began

    def _name(self, files: dict[str, FileRecord]) -> None:
        # comes last: an incomplete checkpoint has no name
        partial, out = self._partial, self._out
        text = json.dumps({"format": FORMAT, "step": self.step, **self._state}, indent=2) + "\n"
        record = FileRecord.write(partial / STATE, text)
        CheckpointManifest.write(partial, self.step, {**files, STATE: record})
        for synced in (partial / SHARDS, partial):
            sync_folder(synced)
        replaced = set_aside(out, "abandoned") if out.exists() else None
        partial.rename(out)
        sync_folder(out.parent)
        if replaced is not None:
            shutil.rmtree(replaced)


class _Attempt:
    """Ranks exchange errors after each part, so that none waits for a rank with a failing file system."""

    def __init__(self, out: Path, group: dist.ProcessGroup | None) -> None:
        self.out = out
        self.group = group
        self.needed = 0

    def together(self, work: Callable[[], None]) -> None:
        error = None
        try:
            work()
        except OSError as failed:
            error = f"{failed.filename or self.out}: {describe_os_error(failed)}"
        self._end_if_any(all_gather_json(error, device=_CPU, group=self.group))

    def all_wrote(self, written: WrittenBoxes) -> dict[str, FileRecord]:
        files = {name: [record.bytes, record.sha256] for name, record in written.files.items()}
        everyone = all_gather_json([files, written.bytes, written.error], device=_CPU, group=self.group)
        self.needed = sum(needed for _, needed, _ in everyone)
        self._end_if_any([error for _, _, error in everyone])
        return {name: FileRecord(*record) for files, _, _ in everyone for name, record in files.items()}

    def _end_if_any(self, errors: list[str | None]) -> None:
        failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
        if not failed:
            return
        partial = partial_path(self.out)
        free = all_gather_json(_free_bytes(self.out.parent), device=_CPU, group=self.group)[0]
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)  # frees space; an incomplete folder is no checkpoint
        older = [path.name for path in checkpoints(self.out.parent) if path != self.out]
        rest = f"the older checkpoints are as they were (the newest is {older[-1]})" if older else "there is no older one"
        needs = f"it needs {self.needed:,} bytes, " if self.needed else ""
        rank, error = failed[0]
        raise RuntimeError(
            f"checkpoint {self.out} could not be written by rank {rank} ({error}); {needs}{free:,} bytes are free; {rest}. "
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


@dataclass
class Counters:
    updates: int = 0  # without skipped steps
    updates_skipped: int = 0

    entropy_noise: float = 0.0  # nats, 99th percentile of the last measurement

    clip_range: tuple[float, float] | None = None  # (low, high) that the last step's ratios gave for ``auto`` bounds


class MegatronCheckpoints:
    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        weights: PolicyWeights,
        counters: Counters,
        *,
        group: dist.ProcessGroup | None,
        heartbeat: Heartbeat,
        about: Mapping[str, Any],
    ) -> None:
        self._policy, self._weights, self._counters = policy, weights, counters
        self._group, self._heartbeat, self._about = group, heartbeat, about
        # FP8 weights are rounded with scales that depend on how tensors are cut
        self._restores_bits = not config.engine.fp8.params
        self._saving: _Saving | None = None
        self.bytes_read = 0

    def save(self, folder: Path, *, step: int, state: dict[str, Any]) -> Path:
        self.begin(folder, step=step, state=state)
        saved = self.finish()
        assert saved is not None
        return saved.path

    def begin(self, folder: Path, *, step: int, state: dict[str, Any], background: bool = False) -> None:
        self.finish()
        self._heartbeat.phase("save")
        weights, rank = self._weights, dist.get_rank()
        self._saving = _Saving(
            folder,
            step=step,
            state={**asdict(self._counters), "weights_digest": weights.version(step).digest, **self._about, **state},
            policy=self._policy,
            shards=_shards_to_save(weights.trained_sources, weights.split, rank, self._policy),
            biases=_bias_boxes(weights.trained_sources, rank, self._policy),
            group=self._group,
            background=background,
        )

    def finish(self, *, wait: bool = True) -> SavedCheckpoint | None:
        saving = self._saving
        if saving is None or not (wait or saving.is_written()):
            return None
        self._saving = None
        return saving.finish()

    def check(self, folder: Path) -> dict[str, Any]:
        return _check(folder, self._group)

    def load(self, folder: Path, checked: dict[str, Any] | None = None) -> dict[str, Any]:
        self._heartbeat.phase("load")
        state = self.check(folder) if checked is None else checked
        counters = self._counters
        counters.updates = state["updates"]
        counters.updates_skipped = state.get("updates_skipped", 0)  # absent from older checkpoints
        counters.entropy_noise = state.get("entropy_noise", 0.0)
        clip_range = state.get("clip_range")
        counters.clip_range = None if clip_range is None else (clip_range[0], clip_range[1])
        self._policy.param_gather.finish()
        self.bytes_read = _load(folder, policy=self._policy, layout=self._weights.trained_layout, updates=counters.updates)
        self._policy.schedule.num_steps = 0
        self._policy.schedule.step(increment=counters.updates)
        if self._restores_bits:
            _check_restored(folder, state, self._weights.version(state["step"]).digest)
        return state
