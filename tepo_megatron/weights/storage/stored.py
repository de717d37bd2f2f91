"""Reads boxes of weights from three kinds of folder, and writes a checkpoint's.

Hugging Face folder      model-00001-of-00002.safetensors: whole tensors under their names
folder of `tepo import`  shards/rank00003-00001.safetensors: "weight|model.norm.weight|0" → the box that starts there
checkpoint               the same with the optimizer's fp32 weights "master|…" and moments "exp_avg|…", "exp_avg_sq|…"
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tepo_megatron.runtime.files import with_retries
from tepo_megatron.weights.architecture import read_object
from tepo_megatron.weights.geometry import Box, ShardLayout
from tepo_megatron.weights.storage.manifest import FileRecord, model_files

T = TypeVar("T")

SHARDS = "shards"

WEIGHT = "weight"

_MTP_PROJECTION = "eh_proj.weight"

_HEAD = "lm_head.weight"
_HEADLESS = " (a reward or embedding model has none; give a model with a head)"

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_FILE_BYTES = 4 * 2**30

_MAX_NAMED = 8


@dataclass(frozen=True)
class _StoredBox:
    file: Path
    key: str
    box: Box
    dtype: str


def box_key(kind: str, tensor: str, box: Box) -> str:
    """The stored tensor's shape is the extent."""
    return f"{kind}|{tensor}|{','.join(map(str, box.start))}"


@dataclass(frozen=True)
class StoredWeights:
    folder: Path
    boxes: Mapping[str, list[_StoredBox]]

    @classmethod
    def open(cls, folder: Path) -> StoredWeights:
        if not (folder / SHARDS).is_dir():
            return cls._open_hugging_face(folder)
        for description, kind in (("state.json", "master"), ("config.json", WEIGHT)):
            if (folder / description).is_file():
                return cls.open_boxes(folder, kind)
        raise ValueError(f"{folder} is a checkpoint that was not finished; give another one")

    @classmethod
    def open_boxes(cls, folder: Path, kind: str) -> StoredWeights:
        return cls.open_kinds(folder, [kind])[kind]

    @classmethod
    def open_kinds(cls, folder: Path, kinds: Sequence[str]) -> dict[str, StoredWeights]:
        """``kinds`` are among "weight", "master", "exp_avg" and "exp_avg_sq". Opens each file once."""
        boxes: dict[str, dict[str, dict[Box, _StoredBox]]] = {kind: {} for kind in kinds}
        for path in sorted((folder / SHARDS).glob("*.safetensors")):
            with open_safetensors(path) as handle:
                for key in handle.keys():  # noqa: SIM118 (safe_open has keys() but is no mapping)
                    fields = key.split("|")
                    if len(fields) != 3:
                        raise ValueError(
                            f"{path} holds {key!r}, which is no box of a tensor; it was not written by this package"
                        )
                    if fields[0] in boxes:
                        start = tuple(map(int, fields[2].split(",")))
                        stored = _stored(handle, path, key, start)
                        boxes[fields[0]].setdefault(fields[1], {}).setdefault(stored.box, stored)
        return {
            kind: cls(folder, {tensor: list(held.values()) for tensor, held in of_kind.items()})
            for kind, of_kind in boxes.items()
        }

    @classmethod
    def _open_hugging_face(cls, folder: Path) -> StoredWeights:
        files, boxes = model_files(folder), dict[str, list[_StoredBox]]()
        if quantization := read_object(folder / "config.json").get("quantization_config"):
            raise ValueError(
                f"{folder} holds quantised weights (config.json has quantization_config = {str(quantization)[:80]}), and the "
                "trainer takes plain ones; give the model that they were made from (rollout.server.quantization rounds the "
                "servers' copies)"
            )
        if not files:
            raise ValueError(
                f"{folder} has no *.safetensors; give a Hugging Face folder with its weights, one of 'tepo import', or a "
                "checkpoint (step_XXXXXX)"
            )
        for name, members in files.items():
            path = folder / name
            with open_safetensors(path) as handle:
                present = set(handle.keys())
                # A tensor that the index names but the file lacks is left out, so that check() reports it.
                for tensor in sorted(present if members is None else present & members):
                    boxes[tensor] = [_stored(handle, path, tensor, (0,) * len(handle.get_slice(tensor).get_shape()))]
        return cls(folder, boxes)

    def check(self, shapes: Mapping[str, tuple[int, ...]], described_by: str = "its config.json") -> None:
        # Old exports keep RoPE's constants as buffers, and a tied head as a copy; both are derived, not weights of their own.
        # Layers that predict further tokens (MTP) are no part of the model that is trained.
        mtp_prefixes = tuple(name.removesuffix(_MTP_PROJECTION) for name in self.boxes if name.endswith(f".{_MTP_PROJECTION}"))
        derived = {
            name
            for name in self.boxes
            if name.endswith("rotary_emb.inv_freq") or name == _HEAD or name.startswith(mtp_prefixes)
        }
        missing = [f"missing: {name}" + (_HEADLESS if name == _HEAD else "") for name in shapes if name not in self.boxes]
        unexpected = [f"unexpected: {name}" for name in self.boxes if name not in shapes and name not in derived]
        wrong = [
            problem
            for name, shape in shapes.items()
            if name in self.boxes
            for problem in _problems(name, tuple(shape), self.boxes[name])
        ]
        problems = first_problems(missing, unexpected, wrong)
        if problems and any(".lora_A." in name for name in self.boxes):
            raise ValueError(
                f"{self.folder} holds LoRA adapters alone; resume the run at its last step, which exports the merged model to "
                "OUT/model and the adapters to OUT/adapter"
            )
        if problems:
            raise ValueError(f"{self.folder} does not hold the model that {described_by} describes:\n  {problems}")

    @classmethod
    def load(
        cls, folder: Path, layout: ShardLayout, params: Mapping[str, Tensor], on_move: Callable[[], None] = lambda: None
    ) -> None:
        """Reads only this rank's boxes; the vocabulary's padding becomes zero.

        Raises ValueError, before any write, naming missing, unexpected and misshapen tensors, or the damaged file.
        """
        weights = cls.open(folder)
        weights.check(layout.shapes)
        with torch.no_grad():
            for param in layout.params:  # some have no shard, on a rank whose rows are all padding
                params[param].zero_()
            for shard in layout.shards:
                weights.read(shard.tensor, shard.box, params[shard.param][shard.param_box.slices])
                on_move()

    def read(self, tensor: str, box: Box, into: Tensor | None = None) -> Tensor:
        """Raises ValueError if the box is incomplete or a file damaged."""
        into = torch.empty(box.shape) if into is None else into
        # The stored boxes of a tensor are parts of one layout and do not overlap, so that counting elements shows a gap.
        filled = 0
        for stored in self.boxes.get(tensor, ()):
            common = box.intersection(stored.box)
            if common is None:
                continue
            with open_safetensors(stored.file) as handle:
                part = handle.get_slice(stored.key)[common.relative_to(stored.box.start).slices]
                into[common.relative_to(box.start).slices].copy_(part)
            filled += part.numel()
        if filled < into.numel():
            raise ValueError(f"{self.folder} holds {filled} of {into.numel()} elements that are needed of {tensor}")
        return into


def first_problems(*kinds: Sequence[str]) -> str:
    """Returns a few lines, with the first of each kind before the rest."""
    problems = [kind[0] for kind in kinds if kind] + [problem for kind in kinds for problem in kind[1:]]
    more = [f"and {len(problems) - _MAX_NAMED} more"] if len(problems) > _MAX_NAMED else []
    return "\n  ".join([*problems[:_MAX_NAMED], *more])


def _problems(name: str, shape: tuple[int, ...], stored: list[_StoredBox]) -> Iterator[str]:
    boxes = [stored_box.box for stored_box in stored]
    is_whole = any(stored_box.key == name for stored_box in stored)
    fits = all(len(box.stop) == len(shape) and all(a <= b for a, b in zip(box.stop, shape, strict=True)) for box in boxes)
    held = sum(box.numel for box in boxes)
    for dtype in sorted({stored_box.dtype for stored_box in stored} - DTYPES.keys()):
        yield f"unsupported: {name} is {dtype}; known: {', '.join(DTYPES)}"
    if not fits or (is_whole and boxes[0].shape != shape):
        yield f"misshapen: {name} is {max(box.stop for box in boxes)}, config.json makes it {shape}"
    elif held != math.prod(shape):
        yield f"incomplete: {name}, of which {held} of {math.prod(shape)} elements are there"


def _stored(handle: safe_open, path: Path, key: str, start: tuple[int, ...]) -> _StoredBox:
    entry = handle.get_slice(key)
    stop = tuple(a + extent for a, extent in zip(start, entry.get_shape(), strict=True))
    return _StoredBox(path, key, Box(start, stop), entry.get_dtype())


@contextmanager
def open_safetensors(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt") as handle:
            yield handle
    except FileNotFoundError:
        raise ValueError(f"{path} is named by the index but is not there; the model folder is incomplete") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); copy or download it again") from None


def safetensors_header(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None) -> bytes:
    """``tensors``: key → safetensors' dtype, and shape."""
    table: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0  # offsets count from the end of the header, so that they do not depend on its length
    for key, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        table[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format pads with spaces, so that the tensors' bytes are aligned to 8
    return len(text).to_bytes(8, "little") + text


@dataclass
class WrittenBoxes:
    """After an ``error`` some ``files`` are missing; ``bytes`` counts all boxes, for the space needed."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    bytes: int = 0
    error: str | None = None

    @staticmethod
    def describe_error(path: Path, error: OSError) -> str:
        return f"{path}: {error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'unknown')})"


def batches(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Each has at most the size ``limit``, or one item."""
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and size + size_of(item) > limit:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += size_of(item)
    if batch:
        yield batch


def tensor_batches(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Yields CPU tensors. Clear each batch, or two are in memory."""
    on_cpu = ((name, tensor.detach().cpu().contiguous()) for name, tensor in tensors)
    return map(dict, batches(on_cpu, lambda named: named[1].nbytes, limit))


def write_boxes(
    folder: Path, stem: str, boxes: Iterable[tuple[str, Tensor]], *, metadata: Mapping[str, str], file_bytes: int = _FILE_BYTES
) -> WrittenBoxes:
    """Writes durably, holding at most ``file_bytes`` or one box."""
    written = WrittenBoxes()
    for number, batch in enumerate(tensor_batches(boxes, file_bytes), 1):
        written.bytes += sum(tensor.nbytes for tensor in batch.values())
        name = f"{SHARDS}/{stem}-{number:05d}.safetensors"
        if written.error is None:
            try:
                written.files[name] = with_retries(partial(_write_file, folder, name, batch, metadata))
            except OSError as error:
                written.error = written.describe_error(folder / name, error)
        batch.clear()
    return written


def _write_file(folder: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    # Not by safetensors' writer: the digest is of memory, so that it reveals a wrong write, and a full disk is an OSError.
    header = safetensors_header({key: (DTYPE_NAMES[tensor.dtype], tensor.shape) for key, tensor in tensors.items()}, metadata)
    digest = hashlib.sha256(header)
    with (folder / name).open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(header))
        for tensor in tensors.values():
            data = tensor.view(-1).view(torch.uint8).numpy().data
            digest.update(data)
            _write_all(file.fileno(), data)
        os.fsync(file.fileno())
        return FileRecord(os.fstat(file.fileno()).st_size, digest.hexdigest())


def _write_all(handle: int, data: memoryview) -> None:
    """``os.write`` writes at most 2 GiB at once."""
    while data:
        data = data[os.write(handle, data) :]
