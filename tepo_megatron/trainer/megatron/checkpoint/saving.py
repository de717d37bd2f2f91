"""Writes a checkpoint, at once or in a background thread of each rank."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.runtime.files import partial_path, sync_folder
from tepo_megatron.trainer.checkpoints.folder import checkpoint_folder, checkpoints, set_aside
from tepo_megatron.trainer.megatron.checkpoint.boxes import state_boxes
from tepo_megatron.trainer.megatron.platform.collectives import all_gather_json
from tepo_megatron.trainer.megatron.policy.policy import Policy
from tepo_megatron.trainer.protocol import SavedCheckpoint
from tepo_megatron.weights.geometry import Shard
from tepo_megatron.weights.storage.manifest import FORMAT, STATE, FileRecord, write_durably, write_manifest
from tepo_megatron.weights.storage.planned_files import WrittenBoxes, describe_os_error, write_boxes
from tepo_megatron.weights.storage.stored import SHARDS

_CPU = torch.device("cpu")


class Saving:
    """Writes ``folder/step_XXXXXX``, replacing it. Every rank makes one and calls its methods in the same order.

    ``group`` has all ranks and works on the host. With ``background`` the constructor copies this rank's states to the host (12
    bytes per parameter).

    Raises the same RuntimeError on all ranks if any rank cannot write.
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
        self._boxes = chain(state_boxes(policy.optimizer, policy.trained, shards), biases)
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
        """Every rank calls."""
        done = self._thread is None or not self._thread.is_alive()
        return all(all_gather_json(done, device=_CPU, group=self._group))

    def finish(self) -> SavedCheckpoint:
        """Waits for every rank. Every rank calls."""
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
        """The name comes last: after a crash no incomplete checkpoint has it."""
        partial, out = self._partial, self._out
        text = json.dumps({"format": FORMAT, "step": self.step, **self._state}, indent=2) + "\n"
        record = write_durably(partial / STATE, text)
        write_manifest(partial, self.step, {**files, STATE: record})
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
