"""Writes checkpoints, also in the background, and reads them under any parallel layout.

The key ``master|model.norm.weight|0`` has the tensor's box from 0.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.config.objective.choices import ClipRange
from tepo_megatron.runtime.files import partial_path, sync_to_disk
from tepo_megatron.trainer.checkpoint_folder import checkpoint_name, checkpoints, read_state, set_aside
from tepo_megatron.trainer.megatron.parallel.collectives import all_gather_json, broadcast_json
from tepo_megatron.trainer.megatron.policy.offload import HostCopies
from tepo_megatron.trainer.megatron.policy.optimizer_states import STATES, OptimizerStates
from tepo_megatron.trainer.megatron.policy.weights import PolicyWeights
from tepo_megatron.trainer.protocol import SavedCheckpoint
from tepo_megatron.weights.geometry import Box, Shard
from tepo_megatron.weights.layouts import MegatronParallel
from tepo_megatron.weights.storage.manifest import FORMAT, STATE, CheckpointManifest, DamagedCheckpoint, FileRecord
from tepo_megatron.weights.storage.stored import SHARDS, StoredWeights, WrittenBoxes, box_key, write_boxes
from tepo_megatron.weights.transfer.full_tensors import GatherPlan

_CPU = torch.device("cpu")

_Boxes = Iterable[tuple[str, Tensor]]  # by `box_key`


def _shards_to_save(
    sources: GatherPlan, split: MegatronParallel, rank: int, states: OptimizerStates, trained: Mapping[str, torch.nn.Parameter]
) -> list[Shard]:
    if not states.distributed:
        return sources.shards_of(rank)
    place = split.coordinates(rank)
    shards = []
    for owner, shard in (pair for pairs in sources.owners.values() for pair in pairs):
        other, param = split.coordinates(owner), trained.get(shard.param)
        if param is None or other.pp_rank != place.pp_rank:
            continue
        expert = OptimizerStates.is_parallel_expert(param)
        same = (other.etp_rank, other.ep_rank) == (place.etp_rank, place.ep_rank) if expert else other.tp_rank == place.tp_rank
        if same:
            shards.append(shard)
    return shards


def _local_parts(flat: Tensor, local: slice, param: Tensor, shards: Iterable[Shard]) -> Iterator[tuple[str, Box, Tensor]]:
    """Yields (tensor, its box, a view). ``flat``: elements ``local`` of the flat parameter."""
    pieces = list(Box.of_range(tuple(param.shape), local.start, local.stop))
    views = flat.split([piece.numel for piece in pieces])
    for shard in shards:
        origin = tuple(a - b for a, b in zip(shard.param_box.start, shard.box.start, strict=True))
        for piece, view in zip(pieces, views, strict=True):
            if (common := shard.param_box.intersection(piece)) is not None:
                part = view.view(piece.shape)[common.relative_to(piece.start).slices]
                yield shard.tensor, common.relative_to(origin), part


def _shards_by_param(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    by_param: dict[str, list[Shard]] = {}
    for shard in shards:
        by_param.setdefault(shard.param, []).append(shard)
    return by_param


class _Saving:
    """Every rank calls in the same order; all raise the same RuntimeError if any cannot write.

    ``group`` works on the host. ``background`` copies local states to the host (12 bytes per parameter).
    """

    def __init__(
        self, out: Path, *, step: int, state: dict[str, Any], boxes: _Boxes, group: dist.ProcessGroup | None, background: bool
    ) -> None:
        began = time.monotonic()
        self.step = step
        self._out, self._state, self._group = out, state, group
        self._partial = partial_path(out)
        self._needed = 0
        self._on_root(lambda: _make_empty(self._partial))
        self._boxes = boxes
        self._write_s = 0.0
        self._written: WrittenBoxes | None = None
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if background:
            copies = HostCopies(torch.device("cuda")) if torch.cuda.is_available() else None
            self._boxes = [(key, box if copies is None else copies.copy(box)) for key, box in boxes]  # on a CPU copies already
            self._thread = threading.Thread(target=self._write, name=f"write-checkpoint-{step}", daemon=True)
            self._thread.start()
        self._stage_s = time.monotonic() - began

    def is_written(self) -> bool:
        done = self._thread is None or not self._thread.is_alive()
        return all(all_gather_json(done, device=_CPU, group=self._group))

    def finish(self) -> SavedCheckpoint:
        began = time.monotonic()
        if self._thread is None:
            self._write()
        else:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._written is not None
        written = self._written
        local = {name: [record.bytes, record.sha256] for name, record in written.files.items()}
        everyone = all_gather_json([local, written.bytes, written.error], device=_CPU, group=self._group)
        self._needed = sum(needed for _, needed, _ in everyone)
        self._end_if_any([error for _, _, error in everyone])
        files = {name: FileRecord(*record) for files, _, _ in everyone for name, record in files.items()}
        self._on_root(lambda: self._name(files))
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
            sync_to_disk(synced)
        replaced = set_aside(out, "abandoned") if out.exists() else None
        partial.rename(out)
        sync_to_disk(out.parent)
        if replaced is not None:
            shutil.rmtree(replaced)

    def _on_root(self, work: Callable[[], None]) -> None:
        error = None
        try:
            if dist.get_rank() == 0:
                work()
        except OSError as failed:
            error = WrittenBoxes.describe_error(failed.filename or self._out, failed)
        self._end_if_any(all_gather_json(error, device=_CPU, group=self._group))

    def _end_if_any(self, errors: list[str | None]) -> None:
        """Ranks exchange errors after each part, so that none waits for one with a failing file system."""
        failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
        if not failed:
            return
        out = self._out
        free, saved = "an unknown number of", None
        if dist.get_rank() == 0:  # alone, and it tells what it can: a disk that fails raises here too
            with suppress(OSError):
                existing = next(folder for folder in out.parents if folder.exists())
                free = f"{shutil.disk_usage(existing).free:,}"
            shutil.rmtree(self._partial, ignore_errors=True)  # frees space; an incomplete folder is no checkpoint
            with suppress(OSError):
                saved = [path.name for path in checkpoints(out.parent)]
        free, saved = broadcast_json([free, saved], source=0, device=_CPU, group=self._group)
        older = [name for name in saved or () if name != out.name]
        rest = f"the older checkpoints are as they were (the newest is {older[-1]})" if older else "there is no older one"
        rest = "the older checkpoints could not be listed" if saved is None else rest
        needs = f"it needs {self._needed:,} bytes, " if self._needed else ""
        advice = "Make room and start again with --overwrite, as there is nothing to resume"
        if saved or saved is None:
            advice = f"Make room ('tepo checkpoint prune {out.parent}' removes older ones) and go on with --resume"
        rank, error = failed[0]
        raise RuntimeError(
            f"checkpoint {out} could not be written by rank {rank} ({error}); {needs}{free} bytes are free; {rest}. {advice}"
        )


def _make_empty(partial: Path) -> None:
    if partial.exists():
        shutil.rmtree(partial)
    (partial / SHARDS).mkdir(parents=True)


@dataclass
class Counters:
    updates: int = 0  # without skipped steps
    updates_skipped: int = 0

    entropy_noise: float = 0.0  # nats, median of the last measurement

    clip_range: ClipRange | None = None  # what the last steps' ratios gave for ``auto`` bounds


class MegatronCheckpoints:
    def __init__(self, weights: PolicyWeights, *, group: dist.ProcessGroup | None, about: Mapping[str, Any]) -> None:
        self._policy, self._weights, self.counters = weights.policy, weights, Counters()
        self._group, self._about = group, about
        self._saving: _Saving | None = None
        self.bytes_read = 0

    def begin(self, folder: Path, *, step: int, state: dict[str, Any], background: bool = False) -> None:
        self.finish()
        self._weights.heartbeat.phase("save")
        digests = {"weights_digest": self._weights.version(step).digest}
        if self._policy.lora is not None:
            digests["adapters_digest"] = self._weights.adapters_digest()
        scheduled = [self._policy.schedule.num_steps, self._weights.config.train.updates_per_step]
        about = {**asdict(self.counters), "scheduled": scheduled, **digests, **self._about}
        out, state = folder / checkpoint_name(step), {**about, **state}
        boxes = self._weights.watched(self._boxes())
        self._saving = _Saving(out, step=step, state=state, boxes=boxes, group=self._group, background=background)

    def _boxes(self) -> Iterator[tuple[str, Tensor]]:
        policy, sources, rank = self._policy, self._weights.trained_sources, dist.get_rank()
        states, trained = OptimizerStates(policy.optimizer), policy.trained  # once: it is a new dict at each access
        by_param = _shards_by_param(_shards_to_save(sources, self._weights.split, rank, states, trained))
        for name, state, values in states.collect(trained):
            param = trained[name]
            for tensor, box, part in _local_parts(values, states.range_of(param), param, by_param.get(name, ())):
                yield box_key(state, tensor, box), part.clone()
        if policy.lora is None:
            for shard in sources.shards_of(rank):
                if shard.param in policy.expert_biases:
                    yield box_key("master", shard.tensor, shard.box), policy.expert_biases[shard.param].clone()

    def finish(self, *, wait: bool = True) -> SavedCheckpoint | None:
        saving = self._saving
        if saving is None or not (wait or saving.is_written()):
            return None
        self._saving = None
        return saving.finish()

    def check(self, folder: Path) -> dict[str, Any]:
        self._weights.heartbeat.phase("load")
        # Rank 0 alone lists the files: a thousand ranks asking for a thousand files each would overload a file system.
        state: dict[str, Any] = {}
        problems: list[str] = []
        try:
            state = read_state(folder) if dist.get_rank() == 0 else {}
        except DamagedCheckpoint as error:
            problems = [*error.problems]
        state, problems = broadcast_json([state, problems], source=0, device=_CPU, group=self._group)
        if not problems and "format" in state:
            try:
                manifest = CheckpointManifest.read(folder)
                local_files = manifest.shares(dist.get_world_size())[dist.get_rank()]
                problems = list(filter(None, map(manifest.wrong_content, self._weights.watched(local_files))))
            except DamagedCheckpoint as error:
                problems = [*error.problems]
            everywhere = all_gather_json(problems, device=_CPU, group=self._group)
            problems = list(dict.fromkeys(problem for rank in everywhere for problem in rank))
        if problems:
            raise DamagedCheckpoint(folder, problems)
        return state

    def load(self, folder: Path, checked: dict[str, Any] | None = None) -> dict[str, Any]:
        self._weights.heartbeat.phase("load")
        state = self.check(folder) if checked is None else checked
        counters = self.counters
        for counter in fields(counters):
            value = state.get(counter.name, counter.default)  # older checkpoints have fewer
            setattr(counters, counter.name, ClipRange(*value) if value and counter.name == "clip_range" else value)
        self._policy.finish_gather()
        self.bytes_read = self._restore(folder)
        then = state.get("identity", {}).get("config", {})  # older checkpoints lack it, or sections
        schedule, per_step, train = self._policy.schedule, self._weights.config.train.updates_per_step, then.get("train", {})
        per_step_then = train["minibatches"] * train.get("epochs_per_batch", 1) if "minibatches" in train else per_step
        done, per_step_then = state.get("scheduled", (counters.updates, per_step_then))  # older checkpoints lack it
        if done > (warmup := schedule.lr_warmup_steps):  # its length is in updates, that of the fall in steps
            done = max(warmup, round(done * per_step / per_step_then))
        schedule.num_steps = 0
        schedule.step(increment=done)
        rounded = self._weights.config.engine.fp8.params or then.get("engine", {}).get("fp8", {}).get("params", False)
        if not rounded:  # with scales that depend on how tensors are cut
            if self._policy.lora is None:
                name, digest = "weights_digest", self._weights.version(state["step"]).digest
            else:
                name, digest = "adapters_digest", self._weights.adapters_digest()
            if digest != (expected := state.get(name, digest)):  # older checkpoints lack it
                raise RuntimeError(
                    f"{folder}: the weights that were read have the digest {digest}, those that were saved {expected}, "
                    "although its files are whole: the memory or the network of a machine is broken, or model.dtype is not the "
                    "checkpoint's"
                )
        return state

    def _restore(self, folder: Path) -> int:
        """Returns the bytes read here. Raises ValueError if a tensor is missing."""
        stored = StoredWeights.open_kinds(folder, STATES)
        policy, states, read = self._policy, OptimizerStates(self._policy.optimizer), 0
        by_param = _shards_by_param(self._weights.trained_layout.shards)
        for name, param in self._weights.watched(policy.trained.items()):
            local = states.range_of(param)
            values = {kind: torch.zeros(local.stop - local.start) for kind in STATES}
            for kind, flat in values.items():
                for tensor, box, into in _local_parts(flat, local, param, by_param.get(name, ())):
                    stored[kind].read(tensor, box, into)
                    read += into.nbytes
            on_device = {kind: value.to(param.device) for kind, value in values.items()}
            states.restore(param, on_device, updates=self.counters.updates)
        for name, bias in policy.expert_biases.items() if policy.lora is None else ():
            for shard in by_param[name]:
                stored["master"].read(shard.tensor, shard.box, bias)
                read += bias.nbytes
        policy.spread(states)
        return read
