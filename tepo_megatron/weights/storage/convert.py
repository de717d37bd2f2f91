"""``tepo export`` and ``tepo import`` in one process without Megatron; the same command continues after an interruption."""

import errno
import fcntl
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.runtime.files import partial_path, sync_to_disk
from tepo_megatron.runtime.run_lock import flock
from tepo_megatron.runtime.text import parse_json
from tepo_megatron.weights.architecture import ModelSpec, is_always_fp32, read_model_spec
from tepo_megatron.weights.geometry import Box
from tepo_megatron.weights.layouts import MegatronParallel, pipeline_stages
from tepo_megatron.weights.storage.hf_folder import SHARD_BYTES, copy_description, model_file_name, write_index
from tepo_megatron.weights.storage.manifest import MANIFEST, STATE, CheckpointManifest
from tepo_megatron.weights.storage.stored import (
    DTYPE_NAMES,
    DTYPES,
    SHARDS,
    WEIGHT,
    StoredWeights,
    batches,
    box_key,
    safetensors_header,
)
from tepo_megatron.weights.table import tensor_shapes

_RECORD = "conversion.sha256"

_BUCKET_BYTES = 32 * 2**20  # of a tensor in memory at a time

_ProgressCallback = Callable[[int, int], None]
"""(bytes done, bytes in all) → None"""


@dataclass(frozen=True)
class _FileEntry:
    key: str
    tensor: str
    box: Box
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.box.numel * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class _PlannedFile:
    name: str
    entries: Sequence[_FileEntry]

    @cached_property
    def header(self) -> bytes:
        return safetensors_header({entry.key: (entry.dtype, entry.box.shape) for entry in self.entries})

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(entry.nbytes for entry in self.entries)

    def is_written(self, folder: Path) -> bool:
        path = folder / self.name
        if not path.is_file() or path.stat().st_size != self.nbytes:
            return False
        with path.open("rb") as file:
            return file.read(len(self.header)) == self.header

    def write(self, folder: Path, source: StoredWeights, advance: Callable[[int], None], bucket_bytes: int) -> None:
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".unfinished")
        with unfinished.open("wb") as file:
            file.write(self.header)
            for entry in self.entries:
                dtype = DTYPES[entry.dtype]
                for box in _buckets(entry.box, dtype.itemsize, bucket_bytes):
                    bucket = source.read(entry.tensor, box, torch.empty(box.shape, dtype=dtype))
                    file.write(bucket.view(torch.uint8).numpy().data)
                    advance(bucket.nbytes)
            file.flush()
            os.fsync(file.fileno())  # before the rename: a power cut must not leave the final name without the bytes
        unfinished.replace(path)


def _buckets(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    row = math.prod(box.shape[1:]) * itemsize
    rows = max(1, limit // row)
    for start in range(box.start[0], box.stop[0], rows):
        stop = min(start + rows, box.stop[0])
        yield Box((start, *box.start[1:]), (stop, *box.stop[1:]))


def export_model(
    source: Path,
    out: Path,
    *,
    model: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    bucket_bytes: int = _BUCKET_BYTES,
    report: _ProgressCallback = lambda done, total: None,
) -> None:
    """Writes a Hugging Face folder from a checkpoint (any layout) or an imported folder.

    ``model`` has config and tokenizer (default: the checkpoint's start). ``dtype`` defaults to its config's. Raises ValueError
    for other or damaged weights, RuntimeError for a full disk.
    """
    model = model or _model_of(source)
    if (source / MANIFEST).exists() or "format" in _state_of(source):
        CheckpointManifest.read_whole(source)
    spec, weights = read_model_spec(model), StoredWeights.open(source)
    shapes = tensor_shapes(spec)
    weights.check(shapes, f"{model / 'config.json'}")
    stored_dtype = _stored_dtype(dtype, model)
    entries = [
        _FileEntry(name, name, Box.whole(shape), "F32" if is_always_fp32(name) else stored_dtype)
        for name, shape in shapes.items()
    ]
    groups = list(batches(entries, lambda entry: entry.nbytes, shard_bytes))
    files = [_PlannedFile(model_file_name(number, len(groups)), group) for number, group in enumerate(groups, 1)]

    def finish(partial: Path) -> None:
        copy_description(model, partial, DTYPES[stored_dtype])
        write_index(partial, [{entry.key: entry.nbytes for entry in file.entries} for file in files])

    _write_folder(out, weights, files, finish, report, bucket_bytes)


def import_model(
    source: Path,
    out: Path,
    *,
    tp: int,
    pp: int,
    vpp: int = 1,
    first_layers: int | None = None,
    last_layers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    bucket_bytes: int = _BUCKET_BYTES,
    report: _ProgressCallback = lambda done, total: None,
) -> None:
    """Writes weights as files per rank of a ``tp`` × ``pp`` layout (``model.shards``), which any layout can read.

    Keeps dtypes. ``vpp``: chunks of a stage. Raises as ``export_model``.
    """
    spec, weights = read_model_spec(source), StoredWeights.open(source)
    spec.check_parallel(tp=tp)
    stages = pipeline_stages(spec.num_layers, pp, chunks=vpp, first=first_layers, last=last_layers)
    weights.check(tensor_shapes(spec))
    parallel = MegatronParallel(tp=tp, pp=pp, stages=stages)
    files = [file for rank in range(tp * pp) for file in _rank_files(spec, weights, parallel, rank, shard_bytes)]
    _write_folder(out, weights, files, lambda partial: copy_description(source, partial, None), report, bucket_bytes)


def check_imported(shards: Path, model: Path) -> None:
    """Compares a few numbers of every tensor."""
    shapes = tensor_shapes(read_model_spec(model))
    imported, original = StoredWeights.open(shards), StoredWeights.open(model)
    imported.check(shapes, f"{model / 'config.json'}")
    original.check(shapes)
    samples = {
        name: Box.whole([min(extent, limit) for extent, limit in zip(shape, (4, 64), strict=False)])
        for name, shape in shapes.items()
    }
    differing = [name for name, box in samples.items() if not torch.equal(imported.read(name, box), original.read(name, box))]
    if differing:
        raise ValueError(
            f"model.shards = {shards} was not imported from model.path = {model}: {len(differing)} of {len(shapes)} tensors "
            f"differ, such as {differing[0]}; import it again (tepo import {model} …)"
        )


def _rank_files(
    spec: ModelSpec, weights: StoredWeights, parallel: MegatronParallel, rank: int, shard_bytes: int
) -> list[_PlannedFile]:
    layout = parallel.layout(spec, rank)
    entries = []
    for shard in layout.shards:
        dtype = weights.boxes[shard.tensor][0].dtype
        entries.append(_FileEntry(box_key(WEIGHT, shard.tensor, shard.box), shard.tensor, shard.box, dtype))
    names = (f"{SHARDS}/rank{rank:05d}-{number:05d}.safetensors" for number in count(1))
    groups = batches(entries, lambda entry: entry.nbytes, shard_bytes)
    return [_PlannedFile(name, group) for group, name in zip(groups, names, strict=False)]


def _write_folder(
    out: Path,
    weights: StoredWeights,
    files: Sequence[_PlannedFile],
    finish: Callable[[Path], None],
    report: _ProgressCallback,
    bucket_bytes: int,
) -> None:
    if out.exists():
        raise ValueError(f"{out} exists already; remove it, or give another folder")
    partial = partial_path(out)
    with _prepared(partial, _conversion_digest(weights, files)):
        unfinished = _unfinished(files, partial, out)
        total = sum(file.nbytes for file in files)
        done = total - sum(file.nbytes for file in unfinished)

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            report(done, total)

        try:
            for file in unfinished:
                advance(len(file.header))
                file.write(partial, weights, advance, bucket_bytes)
            finish(partial)
            for path in (*partial.iterdir(), partial):  # what finish wrote, and the names of folders
                sync_to_disk(path)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            _unfinished(files, partial, out)  # usually raises the error that says how many bytes are missing
            raise RuntimeError(f"the disk of {partial} was full for a moment; run the same command again to go on") from error
        partial.rename(out)
        (out / _RECORD).unlink()


@contextmanager
def _prepared(partial: Path, conversion: str) -> Iterator[None]:
    """Empties the folder of another conversion's files, and keeps other commands out."""
    record = partial / _RECORD
    if partial.exists() and any(partial.iterdir()) and not record.is_file():
        raise ValueError(f"{partial} is in the way and was not made by an interrupted import or export; move it away")
    with ExitStack() as stack:
        try:
            partial.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(record.open("a+"))
            if flock(file.fileno(), fcntl.LOCK_EX) is False:
                raise ValueError(f"another import or export writes {partial} now; let it end, or give another folder")
            file.seek(0)
            if file.read() != conversion:
                for path in partial.iterdir():
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    elif path != record:
                        path.unlink()
                file.truncate(0)
                file.write(conversion)
                file.flush()
        except OSError as error:
            raise ValueError(f"{partial} cannot be written ({error.strerror}); give another folder") from error
        yield


def _conversion_digest(weights: StoredWeights, files: Sequence[_PlannedFile]) -> str:
    digest = hashlib.sha256()
    for path in sorted({stored.file for boxes in weights.boxes.values() for stored in boxes}):
        stat = path.stat()
        digest.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    for file in files:
        digest.update(file.name.encode() + file.header)
        digest.update("".join(f"{entry.tensor} {entry.box}\n" for entry in file.entries).encode())
    return digest.hexdigest()


def _unfinished(files: Sequence[_PlannedFile], partial: Path, out: Path) -> list[_PlannedFile]:
    for path in partial.rglob("*.unfinished"):
        path.unlink()
    unfinished = [file for file in files if not file.is_written(partial)]
    needed, free = sum(file.nbytes for file in unfinished), shutil.disk_usage(partial).free
    if free < needed:
        raise RuntimeError(
            f"{out} needs {needed:,} more bytes, and {free:,} are free on its disk; free {needed - free:,} bytes and run the "
            f"same command again (finished files are kept in {partial}), or give another folder"
        )
    return unfinished


def _state_of(source: Path) -> dict[str, Any]:
    state = source / STATE
    try:
        return parse_json(state.read_bytes(), state, dict) if state.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{state} is damaged ({error}); take another checkpoint") from None


def _model_of(source: Path) -> Path:
    if not (source / STATE).is_file():
        if not (source / "config.json").is_file():
            whole = [path.parent for path in (source / "checkpoints").glob("step_*/state.json") if "." not in path.parent.name]
            example = f"such as {max(whole)}" if whole else "step_XXXXXX that has a state.json"
            raise ValueError(f"{source} is not a finished checkpoint; give a folder {example}")
        return source
    recorded = _state_of(source).get("model")
    if recorded is None:
        raise ValueError(f"{source} does not say which model it was trained from; give its folder with --model")
    if not (Path(recorded) / "config.json").is_file():
        raise ValueError(f"{source} was trained from {recorded}, which is not there any more; give a copy of it with --model")
    return Path(recorded)


def _stored_dtype(dtype: torch.dtype | None, model: Path) -> str:
    if dtype is None:
        config = parse_json((model / "config.json").read_bytes(), model / "config.json", dict)
        name = config.get("dtype") or config.get("torch_dtype") or "float32"
        dtype = getattr(torch, str(name), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{model / 'config.json'}: dtype {name!r} is not known; give --dtype")
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype {dtype} is not supported; known: {', '.join(map(str, DTYPE_NAMES))}")
    return DTYPE_NAMES[dtype]
